"""Hooks of a run: their events, and when the loop of titan/run/trainer.py calls them. Hooks observe; the trainer acts.

    resume, start
      before_step, step_begin, before_forward, accept, updated, flags, result, validates, needs_results, step_end, columns
      rewound         in place of the rest of a step
    failed, close

Every rank calls each event of every hook, in the order of `trainer.hooks`. A hook that communicates must do so on all
ranks, so the order of hooks is the order of their collectives: first those of the lowest `priority`, then by the name of
the entry point. titan's own hooks are beside this file, and docs/api.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan.base.async_scalars import AsyncScalars
from titan.data.base import TensorBatch
from titan.observe.clock import Window
from titan.observe.run_log import EventLog
from titan.step.train_step import StepReport


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """Where a trainer begins.

    Attributes:
        step: the last step before it, as far as the launcher can tell. The phase of the next step decides the layout.
        device: device of a trainer before it in this process, whose process group is still open; None: there was none.
        events: log of that trainer, which has saved `step`; None: resume as the job says.
    """

    step: int = 0
    device: torch.device | None = None
    events: EventLog | None = None


@dataclass
class StepResult:
    """The numbers of one step.

    Attributes:
        step: the step.
        first_sample: global number of the step's first sample.
        report: the same numbers on the device, and each micro-batch's loss.
        loss: mean over the valid targets of the global batch, in nats.
        grad_norm: global gradient norm before clipping.
        scalars: loss, gradient norm, the flag "stop" and the flags of all hooks, on their way to the host.
        flags: for each hook, the maximum over ranks of what its `flags` returned.
        groups: loss and tokens of each source of a blend, summed over the global batch, flat.
    """

    step: int
    first_sample: int
    report: StepReport
    loss: float = float("nan")
    grad_norm: float = float("nan")
    scalars: AsyncScalars | None = None
    flags: dict[Hook, Sequence[float]] = field(default_factory=dict)
    groups: Sequence[float] = ()


class Hook:
    """One concern of a run. A subclass overrides the events that it needs.

    Attributes:
        priority: place among the hooks of a run: titan's begin at 0, and all but Checkpointing (900) and Metrics (910) are
            below 200. A row of metrics has the columns of the hooks before Metrics, and a checkpoint has its step's row.
        state_key: if set, `state_dict` is saved under this name in each checkpoint's titan.json and given back on a resume.
        judges: `accept` decides about each step. The host then waits for the device in each step.
    """

    priority: ClassVar[int] = 500
    state_key = ""
    judges = False

    def resume(self) -> None:
        """Load a state to continue from, before anything of the run is open."""

    def start(self) -> None:
        """Begin: the run continues at `trainer.step`. Console, timer and event log are open."""

    def before_step(self) -> None:
        """Prepare the next step, which may not come. `trainer.step` is still the last one."""

    def step_begin(self) -> None:
        """Begin a step: its clock starts."""

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        """Look at the micro-batches of the step, before the model does."""

    def accept(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return whether the step updates the weights. Only a hook with `judges` is asked."""
        return True

    def updated(self, report: StepReport) -> None:
        """Act on the computed step, whose gradients are gone, and whose numbers are still on the device."""

    def flags(self) -> Sequence[float]:
        """Return numbers of which every rank gets the maximum, in one all-reduce for all hooks."""
        return ()

    def result(self, result: StepResult) -> None:
        """Read the numbers of a step that have reached the host: on a device one step late, unless a hook needs them."""

    def validates(self) -> bool:
        """Return whether `step_end` of this step runs the model on other samples: it may compile, and the step gets a row."""
        return False

    def needs_results(self) -> bool:
        """Return whether this hook needs the numbers of this very step."""
        return self.validates()

    def step_end(self) -> None:
        """End the step: validate, save, log."""

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        """Return more columns for the row of metrics.jsonl that a logged step writes."""
        return {}

    def rewound(self) -> None:
        """Forget later steps: the run is back at an earlier one."""

    def failed(self, error: Exception) -> None:
        """Write what helps to find the cause of an exception in the loop."""

    def close(self) -> None:
        """End threads and files, after a failure too."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint."""
