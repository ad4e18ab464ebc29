"""Writer of one checkpoint, which is complete or does not exist.

    .saving-N/            readers ignore this folder
      __0_0.distcp ...    each rank writes, hashes and fsyncs its tensors
      .metadata           rank 0: DCP's index of tensors, so that plain DCP loads the step
      tensors.json        rank 0: the same index as JSON, which titan reads
      titan.json          rank 0: step, tokens, data position, config
      manifest.json       rank 0, once it has the hashes of all ranks: size and hashes of each file
    step-N/               one rename, then fsync of the parent; only then are older steps deleted

No rank reads another rank's files or relies on seeing them. Object stores have no atomic rename. There the files go to step-N/
directly, and the manifest, written last, is the commit: a remote step without a manifest does not exist.

If anything fails on any rank, every rank gets SaveFailed, the new files are removed, and older steps stay as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from titan.base.errors import kind_of
from titan.checkpoint import SaveFailed
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.manifest import TITAN_JSON, write_manifest
from titan.checkpoint.storage import Location, join, storage_of
from titan.checkpoint.tensors import CheckpointWriter, StateDict, reason

T = TypeVar("T")
# Ranks wait for the slowest disk. A rank that dies closes its connections, so the others notice at once.
TIMEOUT = timedelta(minutes=30)
_numbers = count()


class CheckpointGroup:
    """Gloo group in which ranks save and load together, and which training does not use.

    A save in the background calls collectives from another thread. Collectives of one group from two threads could be matched
    in any order. All ranks create the group together.

    Attributes:
        size: number of ranks.
        rank: this rank.
        process_group: the gloo group, or None with one rank.
        plans_key: key by which DCP caches save plans for the life of the process.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.process_group: Any = (
            dist.new_group(backend="gloo", timeout=TIMEOUT) if self.size > 1 else None
        )
        self.forget_plans()

    def forget_plans(self) -> None:
        """Choose a new key for save plans, so that DCP plans the next save from the beginning."""
        self.plans_key = f"titan {next(_numbers)}"

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        values: list[Any] = [value] * self.size
        if self.process_group is not None:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank, and return the results of all ranks.

        Raises:
            SaveFailed: `work` failed on some rank. All ranks raise it.
        """
        # The exception stays on its rank. Its text and its kind go to all ranks.
        failure, kind, result = "", "", None
        try:
            result = work()
        except Exception as error:
            failure = f"rank {self.rank}: {reason(error)}"
            kind = kind_of(error, default="save_failed")
        outcomes = self.gather((failure, kind, result))
        # Report the failure of the lowest rank.
        if failures := [outcome for outcome in outcomes if outcome[0]]:
            raise SaveFailed(failures[0][0], kind=failures[0][1])
        return [result for *_, result in outcomes]  # pyrefly: ignore[bad-return]

    def run_on_main(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0.

        Raises:
            SaveFailed: `work` failed. All ranks raise it.
        """
        self.run_on_all(work if self.rank == 0 else lambda: None)


def write_step(
    state: StateDict,
    *,
    folder: Location,
    step: int,
    metadata: dict[str, Any],
    group: CheckpointGroup,
) -> Location:
    """Write step N into a folder of checkpoints. All ranks call this together.

    Args:
        state: tensors by name, this rank's shards of them.
        folder: folder of the checkpoints.
        step: number N of the step.
        metadata: JSON-able values for titan.json.
        group: the ranks' group.

    Returns:
        The folder of the step.

    Raises:
        SaveFailed: the step could not be written. Either all ranks raise it, or no rank does.
    """
    storage = storage_of(folder)
    final = join(folder, f"step-{step}")
    target = join(folder, f".saving-{step}") if storage.has_rename else final

    def begin() -> None:
        # No other process saves into this folder, since the run lock has one holder.
        for name in storage.listdir(folder):
            if name.startswith((".saving-", ".removing-")):  # a crash left it
                storage.remove(join(folder, name))
        # A remote step of the same number must lose its manifest before its files change.
        if not storage.has_rename:
            remove_step(final)
        storage.make_folder(target)

    def commit(entries: dict[str, Any]) -> None:
        # Write the manifest last: a folder without it is no checkpoint.
        write_manifest(target, entries, step=step, torch=torch.__version__)
        if storage.has_rename:
            storage.fsync_folder(target)
            replaced = join(folder, f".removing-{step}")
            # A crash between the two renames loses step N, and leaves no partial step.
            if storage.exists(
                final
            ):  # the run went back to an earlier step and reached N again
                storage.rename(final, replaced)
            storage.rename(target, final)
            if storage.exists(replaced):
                storage.remove(replaced)

    # Rank 0 begins, all ranks write, rank 0 commits. Each phase succeeds on all ranks or fails on all.
    try:
        group.run_on_main(begin)
        entries = _write_files(state, target, metadata, group)
        group.run_on_main(lambda: commit(entries))
    # SaveFailed is a RuntimeError. Gloo raises one, too, when another rank has died.
    except (RuntimeError, dcp.CheckpointException) as error:
        group.forget_plans()  # a rank may have cached a plan that rank 0 lacks
        # All ranks share the folder, so only rank 0 cleans up.
        if group.rank == 0:
            with suppress(OSError):
                storage.remove(target)
        kind = kind_of(error, default="save_failed")
        raise SaveFailed(
            f"step {step} could not be saved: {reason(error)}", kind=kind
        ) from error
    return final


def _write_files(
    state: StateDict, target: Location, metadata: dict[str, Any], group: CheckpointGroup
) -> dict[str, Any]:
    """Write every file except the manifest. Return the manifest's entries for the files of all ranks."""
    writer = CheckpointWriter(target, state)
    alone = group.size == 1
    # A rank whose tensors are the same as in the previous save sends no plan and receives none.
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = group.plans_key
    # DCP plans which rank writes which tensor, and calls the writer's `finish` on rank 0.
    dcp.save(
        state,
        storage_writer=writer,
        planner=planner,
        process_group=group.process_group,
        no_dist=alone,
    )

    def finish() -> dict[str, Any]:
        if group.rank == 0:
            writer.write_file(TITAN_JSON, (json.dumps(metadata, indent=1) + "\n").encode())
        return writer.entries

    entries = group.run_on_all(finish)
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}


def remove_step(step: Location) -> None:
    """Delete a checkpoint. Its name or its manifest goes first, so that a partial deletion never looks like a checkpoint."""
    storage = storage_of(step)
    if isinstance(step, Path):
        hidden = step.with_name(f".removing-{step.name}")
        storage.rename(step, hidden)
        storage.remove(hidden)
    elif storage.exists(step):
        if storage.exists(join(step, MANIFEST)):
            storage.remove(join(step, MANIFEST))
        storage.remove(step)
