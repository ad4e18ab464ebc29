"""List the events of a run: what a hook may do, and when the loop of titan/trainer.py calls it.

    resume          load a state to continue from
    start           the run continues at trainer.step; console, timer and event log are open
      step_begin        the clock of a step starts
      before_forward    the step's batches are there
      updated           the step is computed, its numbers are still on the device
      flags             numbers of which every rank gets the maximum, in one all-reduce for all hooks
      result            a step's numbers have reached the host: on a device one step late, unless
      needs_results     some hook needs them in this very step
      step_end          the step is over: validate, save, log
      columns           more columns for the row of metrics.jsonl that a logged step writes
      rewound           back at an earlier step
    failed          the loop raised an exception
    close           end threads and files, after a failure too

Every rank calls each event of every hook, in the order of `trainer.hooks`. A hook that communicates must do so on all
ranks, so the order of hooks is the order of their collectives. The standard hooks are in titan/hooks/, and
docs/hooks.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan.async_scalars import AsyncScalars
from titan.data.packing import Batch
from titan.observe.clock import Window
from titan.train_step import StepReport


@dataclass
class StepResult:
    """Hold the numbers of one step.

    Args:
        first_sample: global number of the step's first sample.
        report: the same numbers on the device, and each micro-batch's loss.
        scalars: loss, gradient norm, the flag "stop" and the flags of all hooks, on their way to the host.
        flags: for each hook, the maximum over ranks of what its `flags` returned.
    """

    step: int
    first_sample: int
    report: StepReport
    loss: float = float("nan")
    grad_norm: float = float("nan")
    scalars: AsyncScalars | None = None
    flags: dict[Hook, Sequence[float]] = field(default_factory=dict)


class Hook:
    """Handle one concern of a run. A subclass overrides the events that it needs (see the table
    above).

    state_key: if set, `state_dict` is saved under this name in each checkpoint's titan.json and given back on a resume.
    """

    state_key = ""

    def resume(self) -> None: ...

    def start(self) -> None: ...

    def step_begin(self) -> None: ...

    def before_forward(self, batches: Sequence[Batch]) -> None: ...

    def updated(self, report: StepReport) -> None: ...

    def flags(self) -> Sequence[float]:
        return ()

    def result(self, result: StepResult) -> None: ...

    def needs_results(self) -> bool:
        return False

    def step_end(self) -> None: ...

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return {}

    def rewound(self) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
