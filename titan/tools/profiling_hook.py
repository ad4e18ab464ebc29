"""Hook for traces of torch's profiler and snapshots of the CUDA allocator, every profile_freq steps.

    step        1 ............. 6 | 7  8  9 | 10    profile_freq 10, profiler_warmup 3, profiler_active 1
    profiler    off               | warm-up | recorded, then <run>/traces/step-10/rank-R.json.gz

While steps are recorded, each block, each of its children, each module outside the blocks, each call of a hook, the loader and
each garbage collection runs in a range with its name (a compiled block as a whole). titan.step.train_step names loss and clipping,
and torch names the optimizer. The backward pass needs no ranges: its nodes have the numbers of the forward operators.
Between traces nothing is changed. `titan profile` (trace_files.py) reads a trace.

A trace begins when the device is idle, so it holds all work of its steps and no work of other
steps.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, profile, record_function, schedule

from titan.base.run_writer import run_files
from titan.observe.step_parts import MODULE
from titan.parallel.init_weights import canonical_name
from titan.parallel.torch_compat import (
    dump_memory_history,
    enclose_calls,
    record_memory_history,
)
from titan.run.hook import Hook
from titan.run.progress import RunProgress

from .trace_kinds import COLLECTION, HOOK, LOADER

# A block, a child of a block, or a module outside the blocks.
_NAMED = re.compile(r"layers\.\w+(\.\w+)?|(?!layers$)\w+")
_MAX_ALLOCATIONS = 100_000  # newest allocations in a snapshot; TorchTitan's number
Undo = Callable[[], object]


class Profiling(Hook):
    """Recorder of the steps that are due. Its own time is taken out of the throughput."""

    priority = 990  # a step ends after its row and its checkpoint

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.section = trainer, trainer.config.profiling
        self.profile: profile | None = None
        self.ranges: list[Undo] = []  # each removes a range
        self.snapshots = self.section.enable_memory_snapshot and trainer.device.type == "cuda"

    def start(self) -> None:
        device = self.trainer.device.type
        if self.snapshots:
            record_memory_history(_MAX_ALLOCATIONS)
        elif self.section.enable_memory_snapshot:
            text = f"no memory snapshots: they are the CUDA allocator's, and this is a {device}"
            self.trainer.console.message(text)
        if not self.section.enable_profiling:
            return
        # A new trace needs no events of the last one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        # It prints a line at each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        recorded = self.section.profiler_active + self.section.profiler_warmup
        self.schedule = schedule(
            wait=self.section.profile_freq - recorded,
            warmup=self.section.profiler_warmup,
            active=self.section.profiler_active,
        )
        self.profile = profile(
            schedule=lambda _: self._next(),
            on_trace_ready=self._write_trace,
            record_shapes=self.section.record_shapes,
        )
        self._begin_next(self.profile.start)

    def step_end(self) -> None:
        """Write the trace and the snapshot that are due, and begin the next step: the steps of a trace have no gaps."""
        with self.trainer.timer.pause("profiling"):
            if self.profile is not None:
                self._begin_next(self.profile.step)
            if self.snapshots and self.trainer.step % self.section.profile_freq == 0:
                self._write_snapshot()

    rewound = step_end  # the step ended early

    def failed(self, error: Exception) -> None:
        # Before `close`, while the allocator's history is there.
        if self.snapshots and isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot("-out-of-memory")
        # The end of a trace would wait for the device, which may wait for ranks that have ended.
        if self.trainer.device.type != "cpu":
            self.profile = None

    def close(self) -> None:
        """Stop the recording. An incomplete trace is not written."""
        self._remove_ranges()
        if self.profile is not None:
            self.profile.stop()

    def _next(self) -> ProfilerAction:
        """Return the action in the next step. Schedules count from 0, and steps from 1."""
        return self.schedule(self.trainer.step)

    def _begin_next(self, begin: Callable[[], object]) -> None:
        """Begin the next step, in which ranges have names if it is recorded."""
        is_recorded = self._next() not in (ProfilerAction.NONE, ProfilerAction.WARMUP)
        if is_recorded and not self.ranges:
            self._add_ranges()
        begin()
        if not is_recorded:
            self._remove_ranges()

    def _add_ranges(self) -> None:
        if self.trainer.device.type != "cpu":  # a trace begins with an idle device
            torch.accelerator.synchronize()
        trainer = self.trainer
        calls: list[Any] = [(trainer.loader, "next_step", LOADER), (gc, "collect", COLLECTION)]
        for hook in trainer.hooks:
            name = f"{HOOK}{type(hook).__name__}."
            calls += [
                (hook, event, name + event)
                for event, empty in vars(Hook).items()
                if callable(empty) and getattr(type(hook), event) != empty and hook is not self
            ]
        self.ranges = [
            *name_modules(trainer.train_step.model_parts),
            *(_in_range(*call) for call in calls),
        ]

    def _remove_ranges(self) -> None:
        for remove in self.ranges:
            remove()
        self.ranges = []

    def _write_trace(self, recording: profile) -> None:
        if not self.ranges:  # `close` has cut the trace short
            return
        name = f"{self.section.save_traces_folder}/step-{{}}/rank-{{}}.json.gz"
        write = lambda path: recording.export_chrome_trace(str(path))  # noqa: E731
        self._write(name, write, "see `titan profile`")

    def _write_snapshot(self, suffix: str = "") -> None:
        name = f"{self.section.save_memory_snapshot_folder}/step-{{}}{suffix}/rank-{{}}.pickle"
        self._write(name, dump_memory_history, "drop it on https://pytorch.org/memory_viz")

    def _write(self, name: str, write: Callable[[Path], object], hint: str) -> None:
        trainer = self.trainer
        name = name.format(trainer.step, trainer.rank)
        if run_files(trainer.run_dir).make(name, write):
            trainer.console.message(f"wrote {trainer.run_dir / name}: {hint}")


def _in_range(owner: Any, method: str, name: str) -> Undo:
    """Run the calls of an object's method in a profiler range. Return the function that undoes this."""
    call = getattr(owner, method)
    setattr(owner, method, record_function(name)(call))
    return partial(setattr, owner, method, call)


def name_modules(parts: Iterable[nn.Module]) -> list[Undo]:
    """Enclose each block, each child of a block, and each module outside the blocks in a range with its name.

    Modules inside a compiled block get none: a change there would compile it again.

    Returns:
        Functions that remove the ranges.
    """
    undo = []
    for part in parts:
        compiled = []
        for wrapped_name, module in part.named_modules():
            name = canonical_name(wrapped_name + ".")[:-1]
            # Deeper modules would make the trace large, and their parents already name them.
            if not _NAMED.fullmatch(name) or wrapped_name.startswith(tuple(compiled)):
                continue
            is_compiled, remove = enclose_calls(module, name=MODULE + name)
            undo.append(remove)
            if is_compiled:
                compiled.append(wrapped_name + ".")
    return undo
