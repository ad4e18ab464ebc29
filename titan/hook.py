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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.async_scalars import AsyncScalars
from titan.config.layout import Layout
from titan.config.phases import Phase
from titan.config.schema import JobConfig
from titan.data.base import TensorBatch
from titan.data.loader import Loader
from titan.data.tokenizer import Tokenizer
from titan.hardware import Hardware
from titan.observe.clock import StepTimer, Window
from titan.observe.console import Console
from titan.observe.run_log import EventLog
from titan.task import Task
from titan.train_step import StepReport, TrainStep

_Hook = TypeVar("_Hook", bound="Hook")


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
    """Handle one concern of a run. A subclass overrides the events that it needs (see the table above).

    state_key: if set, `state_dict` is saved under this name in each checkpoint's titan.json and given back on a resume.
    """

    state_key = ""

    def resume(self) -> None: ...

    def start(self) -> None: ...

    def step_begin(self) -> None: ...

    def before_forward(self, batches: Sequence[TensorBatch]) -> None: ...

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


class Run(Protocol):
    """Say what a hook may use of its run: the trainer, or anything else with these attributes."""

    config: JobConfig
    sizes: Any  # the model's, as its family defines them
    layout: Layout
    hardware: Hardware | None  # from `start` on
    rank: int
    dp_rank: int  # among the ranks that read different samples
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    run_dir: Path

    task: Task
    train_step: TrainStep
    loader: Loader
    validation_loader: Loader | None
    tokenizer: Tokenizer | None  # None: of a task without text
    # From `start` on.
    timer: StepTimer
    console: Console
    events: EventLog

    phases: list[Phase]
    phase: Phase  # that the newest step belongs to

    step: int  # the one that runs, or the last that is done
    first_step: int  # of this start
    last_step: int
    saved_step: int | None  # the last that a checkpoint holds
    is_stopping: bool
    is_writer: (
        bool  # whether this replica group writes the checkpoints; False for all but one of them
    )
    tokens_seen: int
    tokens_per_step: int
    sequences_per_step: int
    result: StepResult  # the last that has reached the host
    # Decides on every rank alike, from loss and norm, whether to update; the host then waits for each step.
    accept: Callable[[Tensor, Tensor], bool] | None
    hooks: list[Hook]

    @property
    def logs_this_step(self) -> bool:
        """Return whether this step writes a row of metrics."""
        ...

    def hook(self, kind: type[_Hook]) -> _Hook | None:
        """Return the first hook of a class, or None."""

    def announce(self, text: str) -> None:
        """Report a decision in the log of every rank, on the console, in events.jsonl and in status.json."""

    def write_status(self) -> None:
        """Write how far the run is to status.json."""

    def go_back(self, *, failed_at: int) -> None:
        """Restart from `step`, which a hook has just loaded, after step `failed_at` went wrong."""
