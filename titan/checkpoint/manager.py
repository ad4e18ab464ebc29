"""Policy of checkpoints: when to save, in which way, which steps to keep, and which step to resume from.

commit.py writes steps, and manifest.py checks them. A save that fails is reported at once, and nothing else is lost: older
steps are deleted only after a new step is committed, and the next save is tried when it is due. A damaged step is reported in
capital letters and set aside, and the newest whole step is used. If no step is whole, the run does not start. A step that cannot
be read now, or that a newer titan wrote, is not damaged: the run ends, and nothing is renamed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from titan.base.errors import kind_of
from titan.checkpoint import CheckpointError, SaveFailed, commit
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.formats import LOST, NEWER
from titan.checkpoint.identity import read_metadata
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.manifest import Damage, describe, find_damage, list_steps
from titan.checkpoint.staging import Staging
from titan.checkpoint.state import (
    average_state,
    empty_optimizer_state,
    load_model,
    load_rng_state,
    model_state,
    optimizer_state,
    rng_state,
)
from titan.checkpoint.storage import Location, as_location, join, storage_of
from titan.checkpoint.tensors import StateDict, load, reason, require_shapes, stored_shapes
from titan.config.schema import CheckpointSection

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "SaveFailed",
    "StateDict",
    "average_state",
    "empty_optimizer_state",
    "list_steps",
    "load",
    "load_model",
    "load_rng_state",
    "model_state",
    "optimizer_state",
    "read_metadata",
    "require_shapes",
    "rng_state",
    "stored_shapes",
]

logger = logging.getLogger("titan")
_WAIT_AT_CLOSE_S = (
    60  # most seconds to wait for a save in the background when the run has failed
)


class CheckpointManager:
    """Manager of the steps in one run folder. Every rank creates a manager, and the ranks call it together."""

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: Path,
        kept: Container[int] = (),
        require_same: Callable[[Location], None] = lambda _: None,
    ) -> None:
        """Open the folder of checkpoints.

        Args:
            section: the section [checkpoint].
            run_dir: folder of the run.
            kept: steps that are always saved and never deleted, such as the last step before a phase.
            require_same: raises CheckpointError for a step of another model.
        """
        self.section, self.kept, self.require_same = section, kept, require_same
        remote = "://" in section.folder
        self.folder = as_location(section.folder) if remote else run_dir / section.folder
        self.staging = Staging(overlap=section.async_mode == "async_with_pinned_mem")
        # The save in progress, whose result is a message for the console, and its step.
        self.background: Future[str] | None = None
        self.background_step, self.blocked_s = 0, 0.0
        self.failure_kind = "save_failed"  # kind of the last failure (titan/base/errors.py)
        self.messages: list[str] = []
        self.saved_at = time.monotonic()

    @cached_property
    def group(self) -> CheckpointGroup:
        """Return the ranks' group. The first use creates it, and all ranks reach that together."""
        return CheckpointGroup()

    # ---- when ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return list_steps(self.folder)

    @property
    def can_save(self) -> bool:
        """Return whether the job saves at all."""
        return not self.section.why_unsaved

    def should_save(self, step: int, *, last_step: int) -> bool:
        """Return whether a checkpoint is due after this step, by the step's number."""
        special = step in self.kept or (step == 1 and self.section.enable_first_step_checkpoint)
        # A save of step 1 shows early whether saving works at all.
        return self.can_save and (
            special or step == last_step or step % self.section.interval == 0
        )

    def is_due_by_time(self) -> bool:
        """Return whether a checkpoint is due by this rank's clock. Clocks differ, so the ranks must agree on the answer."""
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
        """Save step N.

        Args:
            step: number N of the step.
            state: tensors by name, this rank's shards of them.
            metadata: JSON-able values that go into titan.json.
            model_only: save the weights alone, in `export_dtype`.
            wait: save in the foreground, whatever `async_mode` is.

        Returns:
            The folder of the step.

        Raises:
            SaveFailed: the save failed. All ranks raise it. A save in the background raises nothing, and `poll` reports it.
        """
        start = time.monotonic()
        # One save at a time: the next save waits for the previous save.
        if self.background is not None:
            if not self.poll(wait=True) and self.section.on_failure == "stop":
                text = f"step {self.background_step} could not be saved"
                raise SaveFailed(text, kind=self.failure_kind)
            waited_s = time.monotonic() - start
            if waited_s > 1:
                text = f"step {step} had to wait {waited_s:.1f} s for the save before it"
                self.messages.append(text)
        # Count from the beginning of a save, so that a long save does not shift the schedule.
        self.saved_at = time.monotonic()
        if model_only:
            dtype = getattr(torch, self.section.export_dtype)
            state = {k: v.to(dtype) for k, v in state.items() if k.startswith("model.")}
            metadata = metadata | {"model_only": True}
        if wait or self.section.async_mode == "disabled":
            self.messages.append(self._write(step, state, metadata))
        else:
            self._save_in_background(step, state, metadata)
            # The training loop stands still for the copy, or for the start of the copy.
            self.blocked_s = time.monotonic() - start
        return join(self.folder, f"step-{step}")

    def _save_in_background(
        self, step: int, state: StateDict, metadata: dict[str, Any]
    ) -> None:
        # Create the group here, since a new process group needs the main thread of every rank.
        finish, group = self.staging.begin(state), self.group
        done: Future[str] = Future()

        def work() -> None:
            copies: StateDict = {}
            try:
                # All ranks finish their copies first, so that a rank that runs out of memory fails the save for all ranks.
                group.run_on_all(lambda: copies.update(finish()))
                done.set_result(self._write(step, copies, metadata))
            except BaseException as error:
                done.set_exception(error)

        self.background, self.background_step = done, step
        # A plain daemon thread: Python waits for an executor's thread at exit, even if its collective hangs.
        Thread(target=work, name=f"save step {step}", daemon=True).start()

    def poll(self, *, wait: bool = False, timeout_s: float | None = None) -> bool:
        """Check the save in the background. Return False if this rank finds here that the save has failed.

        Args:
            wait: wait for the end of the save.
            timeout_s: most seconds to wait.
        """
        if self.background is None or not (wait or self.background.done()):
            return True
        # Clear the field before reading the result, which may raise.
        done, self.background = self.background, None
        try:
            text = done.result(timeout=timeout_s)
        except RuntimeError as error:
            return self.failed(error)
        blocked_s = self.blocked_s + self.staging.waited_s
        self.messages.append(f"{text}, of which training stood still for {blocked_s:.3f} s")
        return True

    def drain_messages(self) -> list[str]:
        """Return the console's messages since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def failed(self, error: RuntimeError) -> bool:
        """Log a failed save and keep its kind. Return False."""
        self.failure_kind = kind_of(error, default="save_failed")
        logger.error(
            f"{reason(error)}. Earlier checkpoints are as they were; the next save is tried when it is due."
        )
        return False

    def close(self) -> None:
        """Wait for a save in the background, at most 60 seconds."""
        try:
            self.poll(wait=True, timeout_s=_WAIT_AT_CLOSE_S)
        except Exception as error:  # the class of a timeout depends on Python's version
            logger.error(f"step {self.background_step} is given up: {reason(error)}")

    def _write(self, step: int, state: StateDict, metadata: dict[str, Any]) -> str:
        start = time.monotonic()
        path = commit.write_step(
            state, folder=self.folder, step=step, metadata=metadata, group=self.group
        )
        text = f"saved {path} in {time.monotonic() - start:.2f} s"
        # Only rank 0 deletes, after its commit.
        if self.group.rank == 0:
            self._remove_old()
        return text

    def _remove_old(self) -> None:
        keep, every = self.section.keep_latest_k, self.section.keep_every_n_steps
        # Go through all but the newest `keep` steps, oldest first. Zero keeps all steps.
        for step in self.steps()[:-keep] if keep else []:
            if step in self.kept or (every and step % every == 0):
                continue
            path = join(self.folder, f"step-{step}")
            try:
                self.require_same(path)
            except CheckpointError as error:
                if error.kind == "checkpoint_differs":
                    continue  # a step of another model, which this run could not write again
            try:
                commit.remove_step(path)
            except OSError as error:
                logger.warning(f"step {step} could not be deleted: {reason(error)}")

    # ---- resuming ------------------------------------------------------------------------------

    def step_to_resume(self) -> Location | None:
        """Return the verified folder to resume from, or None for a fresh start.

        Raises:
            CheckpointError: `load_step` is missing or damaged, or there are steps and no step is whole.
        """
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
        self.require_same(path)
        return path

    def newest(self, *, read_only: bool = False) -> Location | None:
        """Return the newest whole step, or None if there are no steps. `read_only` leaves damaged steps where they are."""
        steps = self.steps()
        return self._newest_whole(steps, read_only=read_only) if steps else None

    def require_whole(self, path: Location) -> None:
        """Check a checkpoint that was asked for by name.

        Raises:
            CheckpointError: it is damaged, or cannot be verified.
        """
        if damages := self._find_damage(path):
            raise CheckpointError(f"{path} is damaged: {describe(damages)}{_hint(damages)}")

    def _newest_whole(self, steps: list[int], *, read_only: bool = False) -> Location | None:
        damaged: dict[int, list[Damage]] = {}
        # Go backwards from the newest step to the first whole step.
        for step in reversed(steps):
            path = join(self.folder, f"step-{step}")
            if damages := self._find_damage(path):
                damaged[step] = damages
                continue
            self.require_same(path)
            # Set damaged newer steps aside, now that there is an older step to use.
            for bad, damages in damaged.items():
                self._announce(
                    f"CHECKPOINT STEP {bad} IS DAMAGED AND NOT USED: {describe(damages)}. "
                    + (f"STEP {step} IS USED." if read_only else f"RESUMING FROM STEP {step}.")
                )
                if not read_only:
                    self._set_aside(bad)
            return path
        # Never begin from scratch by accident if there were checkpoints.
        if damaged:
            newest = max(damaged)
            raise CheckpointError(
                f"{self.folder}: NO CHECKPOINT IS WHOLE (step {', '.join(map(str, sorted(damaged)))}); step {newest}: "
                f"{describe(damaged[newest])}{_hint(damaged[newest])}"
            )
        self._announce_fresh_start()
        return None

    def _find_damage(self, path: Location) -> list[Damage]:
        """Return the damage, the same on all ranks. Each rank checks its share of the blocks. See `_without_unknown`."""
        if self.section.verify == "off":
            return []
        # All ranks get the union of their findings, so that they decide alike.
        mine = find_damage(path, part=self.group.rank, parts=self.group.size)
        found = self.group.gather(mine)
        return _without_unknown(path, [damage for of_rank in found for damage in of_rank])

    def _set_aside(self, step: int) -> None:
        """Rename a damaged step, or a remote step's manifest, so that no reader takes it for a step."""
        path, storage = join(self.folder, f"step-{step}"), storage_of(self.folder)

        def rename() -> None:
            old, new = path, join(self.folder, f"damaged-{step}")
            # A rename on an object store is a copy, so rename only the small manifest.
            if not storage.has_rename:
                old, new = join(path, MANIFEST), join(path, f"damaged-{MANIFEST}")
            if storage.exists(new):
                storage.remove(new)
            storage.rename(old, new)

        try:
            self.group.run_on_main(rename)
        except SaveFailed as error:
            logger.warning(f"{path} could not be set aside: {error}")

    def _announce(self, text: str) -> None:
        """Log a message at once, and keep it for the console, which opens after a run has resumed."""
        logger.warning(text)
        self.messages.append(text)

    def _announce_fresh_start(self) -> None:
        """Announce the contents of a folder without steps, and name the folders beside it that have steps."""
        parent = self.folder.parent if isinstance(self.folder, Path) else None
        others = [str(p) for p in sorted(parent.glob("*")) if list_steps(p)] if parent else []
        names = storage_of(self.folder).listdir(self.folder)
        if names or others:
            self._announce(
                f"a fresh start: {self.folder} holds no checkpoint to resume from"
                + (f", but {', '.join(names[:5])}" if names else "")
                + (f"; there are checkpoints in {', '.join(others)}" if others else "")
            )


def _without_unknown(path: Location, damages: list[Damage]) -> list[Damage]:
    """Return the damages of a step that can be read and is of no newer titan. Any other step may be whole: it keeps its name.

    Raises:
        CheckpointError: it cannot, or it is.
    """
    if newer := [d for d in damages if d.kind == NEWER]:
        raise CheckpointError(f"{path}: {describe(newer)}", kind=NEWER)
    if lost := [d for d in damages if d.kind == LOST]:
        raise CheckpointError(
            f"{path} cannot be read now: {describe(lost)}. It may be whole, so it keeps its name, and no older step is used. Look at "
            "the mount and the file server; the same command continues",
            kind=LOST,
        )
    return damages


def _hint(damages: list[Damage]) -> str:
    missing = any(d.file == MANIFEST and d.unreadable for d in damages)
    text = '. Without a manifest nothing can be verified; checkpoint.verify = "off" loads it all the same'
    return text if missing else ""
