"""Clock of the training loop: throughput and remaining time.

A window lasts from one logged step to the next. `pause` times validation and saving and takes them
out of the throughput, so tokens per second are the speed of training. The remaining time includes
pauses, at their rate so far.
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
    """Measurements of one window.

    Attributes:
        num_steps: steps in the window.
        step_s: mean seconds of a step, without pauses.
        tokens_per_s: throughput; over all ranks if `tokens` counted all ranks.
        data_wait_s: seconds per step spent waiting for data.
        paused_s: seconds by purpose, such as {"validation": 2.1}.
        eta_s: remaining seconds of the run.
    """

    num_steps: int
    step_s: float
    tokens_per_s: float
    data_wait_s: float
    paused_s: dict[str, float]
    eta_s: float


class StepTimer:
    """Timer of windows of steps. The device must be idle when the caller closes a window.

    Attributes:
        total_s: seconds by purpose since the start, waits for data included.
    """

    def __init__(
        self, *, total_steps: int, step: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._total_steps = total_steps
        self._first_step = self._step = step
        self._start_s = clock()
        # Seconds by purpose in this window, and since the start.
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self._all_paused_s = self._smooth_step_s = 0.0
        self._num_windows = 0

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Time the body ("validation", "checkpoint") and take it out of the throughput."""
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
        """Time the body as a wait for data. Unlike a pause, it stays in the throughput."""
        return self.pause("data")

    def forget_mean(self) -> None:
        """Restart the mean time of a step, since later steps have another size."""
        self._num_windows = 0

    def window(self, *, step: int, tokens: int, steps_left: float | None = None) -> Window:
        """Close the window after a step, and start the next one.

        Args:
            step: last step of the window.
            tokens: tokens that the window trained on.
            steps_left: remaining steps, in units of this window's steps; None: all remaining
                steps are alike.

        Returns:
            Measurements of the window.
        """
        num_steps = step - self._step
        assert num_steps > 0, f"no step since the last window (step {step})"
        now_s = self._clock()
        data_wait_s, paused_s = self._spent_s.pop("data", 0.0), dict(self._spent_s)
        # At least a nanosecond, in case the whole window was a pause.
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
