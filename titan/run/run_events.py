"""Hook for events.jsonl: the account of time, and spikes among the losses of recent steps."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from titan.base.spikes import spike_score
from titan.observe.clock import Window
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress


class RunEvents(Hook):
    """Events of a run: the beginning of its steps, spikes, and goodput."""

    priority = 40

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        section = trainer.config.fault_tolerance
        self.threshold = section.spike_threshold
        self.spikes = Spikes(window=section.spike_window, min_steps=section.spike_min_steps)
        self.steps_begun = 0

    def step_begin(self) -> None:
        trainer = self.trainer
        self.steps_begun += 1  # by this start of the run
        if self.steps_begun == 1:
            trainer.events.begin_steps()
        elif self.steps_begun == 2:  # the first one, with its compilations, is over
            trainer.events.warm(trainer.timer.total_s)

    def result(self, result: StepResult) -> None:
        loss_z, norm_z = self.spikes.add(result.loss, result.grad_norm)
        for name, value, z in (
            ("loss", result.loss, loss_z),
            ("gradient norm", result.grad_norm, norm_z),
        ):
            if z is not None and z > self.threshold:
                self.trainer.events.write(
                    "spike",
                    step=result.step,
                    what=name,
                    value=value,
                    z=round(z, 2),
                    rows=self.trainer.audit_command(result.step),
                )

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        row: dict[str, Any] = self.spikes.take()
        if self.trainer.rank == 0:
            row["goodput"] = round(self.trainer.events.share(self.trainer.timer.total_s), 5)
        return row


class Spikes:
    """Robust z-scores (titan/base/spikes.py) of loss and gradient norm among recent steps."""

    def __init__(self, *, window: int, min_steps: int) -> None:
        self._before = (deque[float](maxlen=window), deque[float](maxlen=window))
        self._min_steps = min_steps
        self._highest: list[float | None] = [None, None]

    def add(self, loss: float, grad_norm: float) -> tuple[float | None, float | None]:
        """Return the z-scores of loss and gradient norm of one step.

        A score is None if too few steps are known or the value is not finite.
        """
        scores: list[float | None] = [None, None]
        for k, (value, before) in enumerate(zip((loss, grad_norm), self._before, strict=True)):
            # Such a value would make every later score useless; recovery.py handles it.
            if not math.isfinite(value):
                continue
            # Score a value before adding it to the baseline.
            if len(before) >= self._min_steps:
                scores[k] = z = spike_score(value, before)
                highest = self._highest[k]
                self._highest[k] = z if highest is None else max(highest, z)
            before.append(value)
        return scores[0], scores[1]

    def take(self) -> dict[str, float | None]:
        """Return the highest scores since the last call, as columns of metrics.jsonl."""
        row = dict(zip(("loss_z", "grad_norm_z"), self._highest, strict=True))
        self._highest = [None, None]
        return {key: z if z is None else round(z, 2) for key, z in row.items()}
