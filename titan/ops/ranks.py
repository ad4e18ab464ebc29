"""Each rank's own time, which tells a slow rank from the ranks that wait for it.

In synchronous training each rank's step takes as long as the slowest rank's, so `step_s` is the
same everywhere. A rank's own time is the time without waits for others: the wait for its next
batch, and the forward passes of its blocks, each timed after FSDP has gathered its weights. On an
accelerator events measure it, and nothing waits for them. A throttled device, a busy host and a
slow disk all show in it. With tensor or context parallelism the ranks of a group also synchronize
inside a block, so they are slow together.

At logged steps the own times travel in the all-reduce that each step has anyway (trainer.py), one
slot for each rank, so they need no other collective. Each rank keeps its rows in
logs/rank-N.times.jsonl.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from titan.base.run_writer import run_files
from titan.parallel.fsdp_compat import after_gathering

# A rank is a straggler from SLOW times the median rank's own time, until it is below RECOVERED times the median.
SLOW = 1.5
RECOVERED = 1.2
# Steps that are judged together, in three logged steps at least: one slow step does not make a slow rank.
WINDOW_STEPS = 20
_LEAST_SHARE = 0.02  # of a step: a rank that is later by less delays no other
_MAX_BYTES = 2**18  # about two thousand rows; a longer file becomes rank-N.times.previous.jsonl
_FLUSH_S = 2.0


class SpanClock:
    """Clock of the named spans of each step. It does not wait for the device."""

    def __init__(self, *, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._seconds = defaultdict[str, float](float)
        # Events at the start and the end of each span: of this step, and of steps that the device may not have finished.
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps = deque[list[tuple[str, Any, Any]]]()
        self._start: Any = None

    def begin_step(self) -> None:
        """Start a step: earlier events belong to the step before."""
        if self._spans:
            self._steps.append(self._spans)
            self._spans = []

    def take(self, num_steps: int) -> defaultdict[str, float]:
        """Return the mean seconds per step since the last call, by span.

        Args:
            num_steps: steps since then. On a device, only the steps that it has finished count.
        """
        # On a device a step counts when its last event is reached, in order.
        num_steps = 0 if self._on_device else num_steps
        while self._steps and all(end.query() for *_, end in self._steps[0][-1:]):
            for name, start, end in self._steps.popleft():
                self._seconds[name] += start.elapsed_time(end) / 1e3
            num_steps += 1
        means = ((name, s / max(num_steps, 1)) for name, s in self._seconds.items())
        self._seconds, seconds = defaultdict(float), defaultdict(float, means)
        return seconds

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        # The device records the time when it reaches the event; the host goes on at once.
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self) -> None:
        self._start = self._now()

    def _add(self, name: str) -> Any:
        """Add the span that ends now, and return its end."""
        now = self._now()
        if self._on_device:
            self._spans.append((name, self._start, now))
        else:
            self._seconds[name] += now - self._start
        return now


class PhaseClock(SpanClock):
    """Clock of the phases of a step: a mark ends a phase and begins the next one."""

    def begin(self) -> None:
        """Begin a step's first phase."""
        self.begin_step()
        self._begin()

    def mark(self, phase: str) -> None:
        """End a phase. Outside of steps nothing is counted."""
        if self._start is not None:
            self._start = self._add(phase)

    def end(self, phase: str) -> None:
        """End the step with its last phase."""
        self.mark(phase)
        self._start = None


class ForwardClock(SpanClock):
    """Clock of the blocks' forward passes during training, in the span "own"."""

    def __init__(self, blocks: Iterable[nn.Module], *, device: torch.device) -> None:
        super().__init__(device=device)
        for block in blocks:
            compiled = block.__dict__.get("_compiled_call_impl")
            if compiled is None:
                # FSDP prepends its hooks: it gathers the weights before our hook and frees them after it.
                block.register_forward_pre_hook(lambda *_: self._begin())
                block.register_forward_hook(lambda m, *_: self._end(m), prepend=True)
            else:  # a hook would be compiled with the block, and cause graph breaks
                after_gathering(block, self._begin)
                block.__dict__["_compiled_call_impl"] = partial(self._enclosed, block, compiled)

    def _enclosed(self, block: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a compiled block, and start and stop the clock around it."""
        self._begin()
        output = call(*args, **kwargs)
        self._end(block)
        return output

    def _end(self, block: nn.Module) -> None:
        if (
            block.training and self._start is not None
        ):  # no validation, and only after a beginning
            self._add("own")
            self._start = None


@dataclass(frozen=True)
class Standing:
    """Own times of all ranks at a logged step, in seconds per step, and changes of the stragglers.

    Attributes:
        slowest_rank: rank with the largest own time.
        slowest_s: its own time.
        median_s: median of the own times.
        new: ranks that have become stragglers.
        gone: stragglers that have recovered.
    """

    slowest_rank: int
    slowest_s: float
    median_s: float
    new: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


class Stragglers:
    """Ranks that are slow in most of the last rows.

    A straggler's own time is above SLOW times the median rank's, by enough to matter.

    Attributes:
        num_rows: rows that are judged together.
        current: stragglers of the last row.
    """

    def __init__(self, *, log_freq: int) -> None:
        """Start without stragglers.

        Args:
            log_freq: steps from one row to the next.
        """
        self.num_rows = max(3, WINDOW_STEPS // log_freq)
        self._ratios = deque[Sequence[float]](maxlen=self.num_rows)
        self.current: set[int] = set()

    def add(self, own_s: Sequence[float], *, step_s: float) -> Standing:
        """Add a logged step.

        Args:
            own_s: own time of each rank, in seconds per step.
            step_s: seconds of a step.

        Returns:
            Own times and changes of the stragglers.
        """
        # The median is not moved by a few slow ranks, as the mean would be.
        middle = median(own_s)
        least = middle + _LEAST_SHARE * step_s
        self._ratios.append([s / max(middle, 1e-9) if s > least else 1.0 for s in own_s])
        new, gone = [], []
        # Not before the window is full, so that a slow start is not reported.
        if len(self._ratios) == self.num_rows:
            for rank in range(len(own_s)):
                ratio = median(row[rank] for row in self._ratios)
                if ratio > SLOW and rank not in self.current:
                    new.append(rank)
                elif ratio < RECOVERED and rank in self.current:
                    gone.append(rank)
        self.current = (self.current | set(new)) - set(gone)
        slowest = max(range(len(own_s)), key=own_s.__getitem__)
        return Standing(slowest, own_s[slowest], middle, tuple(new), tuple(gone))


class TimesLog:
    """File of a rank's times, written at most every two seconds."""

    def __init__(self, run_dir: Path, *, rank: int, host: str) -> None:
        self._files, self._name = run_files(run_dir), f"logs/rank-{rank}.times.jsonl"
        self.path, self.host = run_dir / self._name, host
        self._lines: list[str] = []
        self._written_s = float("-inf")

    def write(self, **row: Any) -> None:
        """Add a row with time and host."""
        self._lines.append(
            json.dumps(row | {"unix_s": round(time.time(), 3), "host": self.host})
        )
        if time.monotonic() - self._written_s > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are still in memory."""
        lines, self._lines = self._lines, []
        self._written_s = time.monotonic()
        if not lines:
            return
        # Two files, so that the newest rows always stay.
        with suppress(OSError):
            if self.path.lstat().st_size > _MAX_BYTES:
                self.path.replace(self.path.with_suffix(".previous.jsonl"))
        for line in lines:
            self._files.append(self._name, f"{line}\n")
