"""Writing one checkpoint: it is whole, or it does not exist.

    .saving-N/            a name that no finder takes for a step
      __0_0.distcp ...    each rank writes and hashes its tensors, and makes the files durable
      .metadata           rank 0: which tensor lies where
      titan.json          rank 0: step, tokens, data position, config
      manifest.json       rank 0, when it has the hashes of all ranks: what each file must be
    step-N/               by one rename, made durable; only now are older steps deleted

No rank reads, or relies on seeing, another's files. Where there is no atomic rename (object stores), files go to step-N/ itself,
and the manifest, written last, is the commit: a remote step without one does not exist.

If anything fails on any rank, every rank gets SaveFailed, what was written is removed, and older steps are as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titan.checkpoint import SaveFailed
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.manifest import HashingStream, write_manifest
from titan.checkpoint.storage import Location, die_at, join, storage_of
from titan.checkpoint.tensors import StateDict, Writer, reason
from titan.health.errors import kind_of

T = TypeVar("T")
TITAN_JSON = "titan.json"
# CheckpointGroup wait for the slowest disk. A rank that dies is noticed at once, whatever the limit.
TIMEOUT = timedelta(minutes=30)


class CheckpointGroup:
    """The ranks that save and load together, in a gloo group of their own: a save in the background must not share the
    training's groups, whose collectives would then be called from two threads. Made on all ranks together."""

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.process_group: Any = (
            dist.new_group(backend="gloo", timeout=TIMEOUT) if self.size > 1 else None
        )

    def gather(self, value: T) -> list[T]:
        """Everyone's values, on every rank."""
        values: list[Any] = [value] * self.size
        if self.process_group is not None:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Everyone's results. If it failed on any rank, SaveFailed on all of them."""
        failure, kind, result = "", "", None
        try:
            result = work()
        except Exception as error:
            failure = f"rank {self.rank}: {reason(error)}"
            kind = kind_of(error, default="save_failed")
        outcomes = self.gather((failure, kind, result))
        if failures := [outcome for outcome in outcomes if outcome[0]]:
            raise SaveFailed(failures[0][0], kind=failures[0][1])
        return [result for *_, result in outcomes]  # pyright: ignore[reportReturnType]

    def run_on_main(self, work: Callable[[], T]) -> T | None:
        """Rank 0 alone does it, and all know how it went; rank 0's result, on rank 0."""
        return self.run_on_all(lambda: work() if self.rank == 0 else None)[0]


def write(
    state: StateDict,
    *,
    folder: Location,
    step: int,
    metadata: dict[str, Any],
    group: CheckpointGroup,
) -> Location:
    """Write step N into a folder of checkpoints; all ranks call this together. Raises SaveFailed on all or none."""
    files = storage_of(folder)
    final = join(folder, f"step-{step}")
    target = join(folder, f".saving-{step}") if files.has_rename else final

    def clear() -> None:
        for name in files.listdir(folder):
            if name.startswith((".saving-", ".removing-")):  # left by a crash
                files.remove(join(folder, name))
        if not files.has_rename:
            remove(final)
        files.make_folder(target)

    def commit(entries: dict[str, Any]) -> None:
        die_at("manifest", target)
        write_manifest(target, entries, step=step)
        if files.has_rename:
            files.fsync_folder(target)
            die_at("rename", target)
            hidden = join(folder, f".removing-{step}")
            if files.exists(final):  # the run was taken back to an earlier step and got here again
                files.rename(final, hidden)
                die_at("replace", target)
            files.rename(target, final)
            die_at("renamed", final)
            if files.exists(hidden):
                files.remove(hidden)

    try:
        group.run_on_main(clear)
        entries = _write_files(state, target, metadata, group)
        group.run_on_main(lambda: commit(entries))
    except (
        RuntimeError,
        dcp.CheckpointException,
    ) as error:  # the first, of gloo too: a rank has died
        if group.rank == 0:
            with suppress(OSError):
                files.remove(target)
        kind = kind_of(error, default="save_failed")
        raise SaveFailed(f"step {step} could not be saved: {reason(error)}", kind=kind) from error
    return final


def _write_files(
    state: StateDict, target: Location, metadata: dict[str, Any], group: CheckpointGroup
) -> dict[str, Any]:
    """Everything but the manifest; entries of all ranks' files."""
    die_at("data", target)
    writer = Writer(target, state)
    dcp.save(
        state, storage_writer=writer, process_group=group.process_group, no_dist=group.size == 1
    )
    die_at("written", target)

    def titan_json() -> dict[str, Any]:
        files = storage_of(target)
        with files.open(join(target, TITAN_JSON), "wb") as stream:
            hashing = HashingStream(stream)
            hashing.write((json.dumps(metadata, indent=1) + "\n").encode())
            files.fsync(stream)
        return {TITAN_JSON: hashing.entry()}

    mine = group.run_on_all(lambda: writer.entries | (titan_json() if group.rank == 0 else {}))
    return {name: entry for entries in mine for name, entry in entries.items()}


def remove(step: Location) -> None:
    """Delete a step; it stops existing at once, and half of one never has its name."""
    files = storage_of(step)
    if isinstance(step, Path):
        hidden = step.with_name(f".removing-{step.name}")
        files.rename(step, hidden)
        die_at("delete", step)
        files.remove(hidden)
    elif files.exists(step):
        if files.exists(join(step, MANIFEST)):
            files.remove(join(step, MANIFEST))
        die_at("delete", step)
        files.remove(step)
