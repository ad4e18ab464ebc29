"""Measure throughput and the time left.

A window lasts from one logged step to the next. `pause` times validation and saving and takes them out of the throughput, so
that tokens per second say how fast training is. The time left includes them, at their rate so far.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

_NEWEST = 0.3  # weight of the newest window in the smoothed step time


@dataclass(frozen=True, kw_only=True)
class Window:
    """Hold the measurements of one window. tokens_per_s covers all ranks if `tokens` did."""

    num_steps: int
    step_s: float
    tokens_per_s: float
    data_wait_s: float
    """Per step."""
    paused_s: dict[str, float]
    """Seconds by purpose, such as {"validation": 2.1}."""
    eta_s: float


class StepTimer:
    """Time windows of steps. The caller makes sure that the device is idle when it closes a window."""

    def __init__(
        self, *, total_steps: int, step: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._total_steps = total_steps
        self._first_step = self._step = step
        self._start_s = clock()
        # Seconds by purpose, waits for data included: of this window, and of all.
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self._all_paused_s = self._smooth_step_s = 0.0
        self._num_windows = 0

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Take the body ("validation", "checkpoint") out of the throughput."""
        start_s = self._clock()
        try:
            yield
        finally:
            # After an exception too: a rewind catches it, and the time is gone all the same.
            spent_s = self._clock() - start_s
            self._spent_s[what] += spent_s
            self.total_s[what] += spent_s

    @property
    def data_wait_s(self) -> float:
        """Return the seconds spent waiting for data in this window so far."""
        return self._spent_s["data"]

    def data_wait(self) -> AbstractContextManager[None]:
        """Count the body as waiting for data. Unlike a pause, it stays in the throughput."""
        return self.pause("data")

    def forget_mean(self) -> None:
        """Restart the mean time of a step, since steps have another size from now on."""
        self._num_windows = 0

    def window(self, *, step: int, tokens: int, steps_left: float | None = None) -> Window:
        """Close the window after `step`, in which `tokens` were trained on, and start the next.

        steps_left: in the size of this window's steps; None: all to come are as these.
        """
        num_steps = step - self._step
        assert num_steps > 0, f"no step since the last window (step {step})"
        now_s = self._clock()
        data_wait_s, paused_s = self._spent_s.pop("data", 0.0), dict(self._spent_s)
        # At least a nanosecond, in case that a pause was all there was.
        training_s = max(now_s - self._start_s - sum(paused_s.values()), 1e-9)
        step_s = training_s / num_steps
        # An exponential mean. The second window replaces the first, which was slow from compiling.
        weight = _NEWEST if self._num_windows > 1 else 1.0
        self._smooth_step_s += weight * (step_s - self._smooth_step_s)
        # Validation and saving come rarely, so their rate is a mean over the whole start.
        self._all_paused_s += sum(paused_s.values())
        pause_per_step_s = self._all_paused_s / (step - self._first_step)
        self._step, self._start_s, self._num_windows = step, now_s, self._num_windows + 1
        self._spent_s.clear()
        if steps_left is None:
            steps_left = self._total_steps - step
        return Window(
            num_steps=num_steps,
            step_s=step_s,
            tokens_per_s=tokens / training_s,
            data_wait_s=data_wait_s / num_steps,
            paused_s=paused_s,
            eta_s=max(steps_left, 0) * (self._smooth_step_s + pause_per_step_s),
        )
