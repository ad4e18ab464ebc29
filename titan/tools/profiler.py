"""Traces of torch's profiler and snapshots of the CUDA allocator, every profile_freq steps.

    step        1 ............. 6 | 7  8  9 | 10    profile_freq 10, profiler_warmup 3, profiler_active 1
    profiler    off               | warm-up | recorded, then <run>/traces/step-10/rank-R.json.gz

While steps are recorded, each block, each of its children and each module outside the blocks runs
in a range with its name (a compiled block as a whole). titan.step.train_step names loss and clipping,
and torch names the optimizer. The backward pass needs no ranges: the profiler links its operators
to the forward ones. Between traces nothing is changed. `titan profile` (trace_files.py) reads a
trace.

A trace begins when the device is idle, so it holds all work of its steps and no work of other
steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titan.base.run_writer import run_files
from titan.config.schema import ProfilingSection
from titan.observe.step_parts import MODULE
from titan.parallel.init_weights import canonical_name
from titan.parallel.torch_compat import (
    dump_memory_history,
    enclose_calls,
    record_memory_history,
)

# A block, a child of a block, or a module outside the blocks.
_NAMED = re.compile(r"layers\.\w+(\.\w+)?|(?!layers$)\w+")
_MAX_ALLOCATIONS = 100_000  # newest allocations in a snapshot; TorchTitan's number


@dataclass(eq=False)
class Profiler:
    """Recorder of the steps that are due. Call `begin` and `end` around each step.

    Args:
        section: config section [profiling].
        run_dir: run folder.
        rank: this rank.
        device: device of the model.
        parts: the whole model, or this rank's pipeline stages.
        say: prints a line.
    """

    section: ProfilingSection
    run_dir: Path
    rank: int
    device: torch.device
    parts: Sequence[nn.Module]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._step = 0
        self._ranges: list[Callable[[], None]] = []  # each removes the range of a module
        self._profile: profile | None = None  # a new one for each trace
        self._snapshots = self.section.enable_memory_snapshot and self.device.type == "cuda"
        if self._snapshots:
            record_memory_history(_MAX_ALLOCATIONS)
        elif self.section.enable_memory_snapshot:
            self.say(
                f"no memory snapshots: they are the CUDA allocator's, and this is a {self.device.type}"
            )

    def begin(self, step: int) -> None:
        """Begin a step: warm up or record, if a trace is due. Steps count from 1."""
        self._step = step
        action = self.action_of(step)
        if not self.section.enable_profiling or action is ProfilerAction.NONE:
            return
        if action is not ProfilerAction.WARMUP and not self._ranges:
            if (
                self.device.type != "cpu"
            ):  # see the module's docstring: begin with an idle device
                torch.accelerator.synchronize()
            self._ranges = name_modules(self.parts)
        # The first step of this trace, or the step that a resumed run starts with.
        if self._profile is None:
            self._profile = self._make_profile(step)
            self._profile.start()
        else:
            self._profile.step()

    def end(self) -> None:
        """End the step. Write the trace and the snapshot that are due."""
        # Traces and snapshots share their steps.
        if self._step % self.section.profile_freq:
            return
        if self._profile is not None:
            self._profile.step()  # which writes the trace
            self.close()
        if self._snapshots:
            self._write_snapshot(f"step-{self._step}")

    def out_of_memory(self) -> None:
        """Write the allocator's state after a failed allocation, in any step."""
        if self._snapshots:
            self._write_snapshot(f"step-{self._step}-out-of-memory")

    def close(self) -> None:
        """Stop the recording. An incomplete trace is not written."""
        for remove in self._ranges:
            remove()
        self._ranges = []
        if self._profile is not None:
            # stop() would write an incomplete trace.
            self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None

    def _make_profile(self, first: int) -> profile:
        """Return a profiler for the steps from `first` to the next multiple of profile_freq."""
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # it prints a line at each start and stop
        activities = [ProfilerActivity.CPU]
        if self.device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, self.device.type.upper()))
        # torch also asks for the action of the step after the last.
        last = first + -first % self.section.profile_freq
        return profile(
            activities=activities,
            schedule=lambda n: (
                self.action_of(first + n) if first + n <= last else ProfilerAction.NONE
            ),
            on_trace_ready=self._write_trace,
            record_shapes=self.section.record_shapes,
        )

    def action_of(self, step: int) -> ProfilerAction:
        """Return the profiler's action in a step."""
        section = self.section
        left = -step % section.profile_freq  # steps until the trace is written
        if left == 0:
            return ProfilerAction.RECORD_AND_SAVE
        if left < section.profiler_active:
            return ProfilerAction.RECORD
        if left < section.profiler_active + section.profiler_warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def _write_trace(self, recording: profile) -> None:
        folder = f"{self.section.save_traces_folder}/step-{self._step}"
        self._write(
            f"{folder}/rank-{self.rank}.json.gz",
            lambda path: recording.export_chrome_trace(str(path)),
            "see `titan profile`",
        )

    def _write_snapshot(self, folder: str) -> None:
        folder = f"{self.section.save_memory_snapshot_folder}/{folder}"
        hint = "drop it on https://pytorch.org/memory_viz"
        self._write(f"{folder}/rank-{self.rank}.pickle", dump_memory_history, hint)

    def _write(self, name: str, write: Callable[[Path], object], hint: str) -> None:
        if run_files(self.run_dir).make(name, write):
            self.say(f"wrote {self.run_dir / name}: {hint}")


def name_modules(parts: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Enclose each block, each child of a block, and each module outside the blocks in a range with its name.

    Modules inside a compiled block get none: a change there would compile it again.

    Returns:
        Functions that remove the ranges.
    """
    undo = []
    for part in parts:
        compiled: list[str] = []
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
