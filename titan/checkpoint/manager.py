"""When to save, in which way, what to keep, and what to resume from. commit.py writes; manifest.py says what is whole.

A save that fails is reported at once and costs nothing but itself: older steps are only deleted after a new one is
committed, and the next one is tried when it is due. A step that is damaged is set aside, in capital letters, and the newest whole
one is used; where none is left, the run does not start.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from titan.checkpoint import CheckpointError, SaveFailed
from titan.checkpoint import commit as committing
from titan.checkpoint.commit import TITAN_JSON, CheckpointGroup
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.manifest import Damage, describe, find_damage, list_steps
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import (
    empty_optimizer_state,
    load_rng_state,
    model_state,
    optimizer_state,
    rng_state,
)
from titan.checkpoint.storage import Location, as_location, join, storage_of
from titan.checkpoint.tensors import StateDict, load, reason, stored_shapes
from titan.config.schema import CheckpointSection
from titan.health.errors import kind_of
from titan.untrusted import Count, InputError, parse_json, read_stream

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "SaveFailed",
    "StateDict",
    "empty_optimizer_state",
    "list_steps",
    "load",
    "load_rng_state",
    "model_state",
    "optimizer_state",
    "read_metadata",
    "rng_state",
    "stored_shapes",
]

logger = logging.getLogger("titan")
_WAIT_AT_CLOSE_S = 60  # for a save in the background, when the run has failed


class CheckpointManager:
    """Saves and loads the steps of one run folder; all ranks make one and call it together."""

    def __init__(self, section: CheckpointSection, *, run_dir: Path) -> None:
        self.section = section
        remote = "://" in section.folder
        self.folder = as_location(section.folder) if remote else run_dir / section.folder
        self.staging = Staging(overlap=section.async_mode == "async_with_pinned_mem")
        self.background: Future[str] | None = None  # gives what to say of the save under way
        self.background_step, self.blocked_s = 0, 0.0
        self.failure_kind = "save_failed"  # of the last save that failed; titan/health/errors.py
        self.messages: list[str] = []  # for the console
        self.saved_at = time.monotonic()

    @cached_property
    def group(self) -> CheckpointGroup:
        return CheckpointGroup()

    # ---- when ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed checkpoints, oldest first."""
        return list_steps(self.folder)

    @property
    def can_save(self) -> bool:
        return self.section.enable and not self.section.load_only

    def should_save(self, step: int, *, last_step: int) -> bool:
        """Whether a checkpoint is due after this step, by its number."""
        first = step == 1 and self.section.enable_first_step_checkpoint
        return self.can_save and (first or step == last_step or step % self.section.interval == 0)

    def is_due_by_time(self) -> bool:
        """By this rank's clock: the ranks have to agree on it."""
        minutes = self.section.interval_minutes
        return self.can_save and 0 < minutes * 60 <= time.monotonic() - self.saved_at

    # ---- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: StateDict,
        *,
        metadata: dict[str, Any],
        model_only: bool = False,
        wait: bool = True,
    ) -> Location:
        """Save step N, in the background if `async_mode` and not `wait` say so. `metadata` is kept beside it as JSON.

        Raises SaveFailed on all ranks: where it waits, of this save; of one in the background, `poll` tells.
        """
        start = time.monotonic()
        if self.background is not None:
            if not self.poll(wait=True) and self.section.on_failure == "stop":
                raise SaveFailed(
                    f"step {self.background_step} could not be saved", kind=self.failure_kind
                )
            waited_s = time.monotonic() - start
            if waited_s > 1:
                self.messages.append(
                    f"step {step} had to wait {waited_s:.1f} s for the save before it"
                )
        self.saved_at = time.monotonic()
        if model_only:
            dtype = getattr(torch, self.section.export_dtype)
            state = {k: v.to(dtype) for k, v in state.items() if k.startswith("model.")}
            metadata = metadata | {"model_only": True}
        if wait or self.section.async_mode == "disabled":
            self.messages.append(self._write(step, state, metadata))
        else:
            finish, group = self.staging.begin(state), self.group
            done: Future[str] = Future()

            def work() -> None:
                copies: StateDict = {}
                try:
                    group.run_on_all(lambda: copies.update(finish()))
                    done.set_result(self._write(step, copies, metadata))
                except BaseException as error:
                    done.set_exception(error)

            self.background, self.background_step = done, step
            Thread(target=work, name=f"save step {step}", daemon=True).start()
            self.blocked_s = time.monotonic() - start
        return join(self.folder, f"step-{step}")

    def poll(self, *, wait: bool = False, timeout_s: float | None = None) -> bool:
        """Look after the save in the background. False: it has failed, which is told here, on this rank's own clock."""
        if self.background is None or not (wait or self.background.done()):
            return True
        done, self.background = self.background, None
        try:
            text = done.result(timeout=timeout_s)
        except RuntimeError as error:
            return self.failed(error)
        blocked_s = self.blocked_s + self.staging.waited_s
        self.messages.append(f"{text}, of which training stood still for {blocked_s:.3f} s")
        return True

    def drain_messages(self) -> list[str]:
        """What has happened since the last call, for the console."""
        news, self.messages = self.messages, []
        return news

    def failed(self, error: RuntimeError) -> bool:
        self.failure_kind = kind_of(error, default="save_failed")
        logger.error(
            f"{reason(error)}. Earlier checkpoints are as they were; the next save is tried when it is due."
        )
        return False

    def close(self) -> None:
        """Let a save in the background end, if it can."""
        try:
            self.poll(wait=True, timeout_s=_WAIT_AT_CLOSE_S)
        except Exception as error:  # a timeout's class depends on Python's version
            logger.error(f"step {self.background_step} is given up: {reason(error)}")

    def _write(self, step: int, state: StateDict, metadata: dict[str, Any]) -> str:
        start = time.monotonic()
        path = committing.write(
            state, folder=self.folder, step=step, metadata=metadata, group=self.group
        )
        text = f"saved {path} in {time.monotonic() - start:.2f} s"
        if self.group.rank == 0:
            self._remove_old()
        return text

    def _remove_old(self) -> None:
        keep, every = self.section.keep_latest_k, self.section.keep_every_n_steps
        for step in self.steps()[:-keep] if keep else []:
            if every and step % every == 0:
                continue
            try:
                committing.remove(join(self.folder, f"step-{step}"))
            except OSError as error:
                logger.warning(f"step {step} could not be deleted: {reason(error)}")

    # ---- resuming ------------------------------------------------------------------------------

    def step_to_resume(self) -> Location | None:
        """The folder to resume from, verified, or None for a fresh start. Raises CheckpointError where there are
        checkpoints, but not the one that is wanted, or none that is whole."""
        if not self.section.enable:
            return None
        steps, wanted = self.steps(), self.section.load_step
        if wanted == -1:
            return self._newest_whole(steps)
        if wanted not in steps:
            raise CheckpointError(
                f"checkpoint.load_step: there is no step {wanted} in {self.folder}; there is "
                + (", ".join(map(str, steps)) if steps else "none at all")
            )
        path = join(self.folder, f"step-{wanted}")
        self.require_whole(path)
        return path

    def newest(self, *, read_only: bool = False) -> Location | None:
        """The newest step that is whole, or None where there is none at all. read_only: leave damaged ones where they are."""
        steps = self.steps()
        return self._newest_whole(steps, read_only=read_only) if steps else None

    def require_whole(self, path: Location) -> None:
        """Raises CheckpointError if a checkpoint that was asked for by name is damaged, or cannot be verified."""
        if damages := self._find_damage(path):
            raise CheckpointError(f"{path} is damaged: {describe(damages)}{_hint(damages)}")

    def _newest_whole(self, steps: list[int], *, read_only: bool = False) -> Location | None:
        damaged: dict[int, list[Damage]] = {}
        for step in reversed(steps):
            path = join(self.folder, f"step-{step}")
            if found := self._find_damage(path):
                damaged[step] = found
                continue
            for bad, damages in damaged.items():
                self._announce(
                    f"CHECKPOINT STEP {bad} IS DAMAGED AND NOT USED: {describe(damages)}. "
                    + (f"STEP {step} IS USED." if read_only else f"RESUMING FROM STEP {step}.")
                )
                if not read_only:
                    self._set_aside(bad)
            return path
        if damaged:
            newest = max(damaged)
            raise CheckpointError(
                f"{self.folder}: NO CHECKPOINT IS WHOLE (step {', '.join(map(str, sorted(damaged)))}); step {newest}: "
                f"{describe(damaged[newest])}{_hint(damaged[newest])}"
            )
        self._say_what_else_is_there()
        return None

    def _find_damage(self, path: Location) -> list[Damage]:
        """On all ranks the same; each looks at its share of the blocks."""
        if self.section.verify == "off":
            return []
        mine = find_damage(path, part=self.group.rank, parts=self.group.size)
        return [damage for found in self.group.gather(mine) for damage in found]

    def _set_aside(self, step: int) -> None:
        """Under a name that no finder takes for a step; of a remote one, only the manifest."""
        path, files = join(self.folder, f"step-{step}"), storage_of(self.folder)

        def rename() -> None:
            old, new = path, join(self.folder, f"damaged-{step}")
            if not files.has_rename:
                old, new = join(path, MANIFEST), join(path, f"damaged-{MANIFEST}")
            if files.exists(new):
                files.remove(new)
            files.rename(old, new)

        try:
            self.group.run_on_main(rename)
        except SaveFailed as error:
            logger.warning(f"{path} could not be set aside: {error}")

    def _announce(self, text: str) -> None:
        """To the log at once, and to the console, which opens after a run has resumed."""
        logger.warning(text)
        self.messages.append(text)

    def _say_what_else_is_there(self) -> None:
        parent = self.folder.parent if isinstance(self.folder, Path) else None
        others = (
            [f"{path}" for path in sorted(parent.glob("*")) if list_steps(path)] if parent else []
        )
        names = storage_of(self.folder).listdir(self.folder)
        if names or others:
            self._announce(
                f"a fresh start: {self.folder} holds no checkpoint to resume from"
                + (f", but {', '.join(names[:5])}" if names else "")
                + (f"; there are checkpoints in {', '.join(others)}" if others else "")
            )


def _hint(damages: list[Damage]) -> str:
    missing = any(d.file == MANIFEST and d.reason.startswith("cannot be read") for d in damages)
    text = '. Without a manifest nothing can be verified; checkpoint.verify = "off" loads it all the same'
    return text if missing else ""


@dataclass
class _Saved:
    """What titan itself reads of a step's titan.json."""

    step: Count = 0
    tokens: Count = 0
    model_only: bool = False
    config: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)


def read_metadata(path: Location, *wanted: str) -> dict[str, Any]:
    """What `save` was given as metadata. Raises CheckpointError where it cannot be that, or lacks a key of `wanted`."""
    files, name = storage_of(path), join(path, TITAN_JSON)
    try:
        with files.open(name, "rb") as stream:
            text = read_stream(stream, files.size(name), name=name)
        parse_json(text, _Saved, name=name)
        content = parse_json(text, dict[str, Any], name=name)
    except (OSError, InputError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of titan: {error}") from error
    if missing := [key for key in wanted if key not in content]:
        raise CheckpointError(f"{name}: lacks {', '.join(missing)}")
    return content
