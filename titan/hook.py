"""Hooks of a run: their events, and when the loop of titan/trainer.py calls them. Hooks observe; the trainer acts.

    resume          load a state to continue from
    start           the run continues at trainer.step; console, timer and event log are open
      before_step       the next step may begin; trainer.step is still the last one
      step_begin        the clock of a step starts
      before_forward    the step's batches are there
      accept            a hook with `judges` decides whether the weights are updated
      updated           the step is computed, its numbers are still on the device
      flags             numbers of which every rank gets the maximum, in one all-reduce for all hooks
      result            a step's numbers have reached the host: on a device one step late, unless
      needs_results     some hook needs them in this very step
      validates         `step_end` of this step runs the model on other samples: it may compile, and the step gets a row
      step_end          the step is over: validate, save, log
      columns           more columns for the row of metrics.jsonl that a logged step writes
      rewound           back at an earlier step
    failed          the loop raised an exception
    close           end threads and files, after a failure too

Every rank calls each event of every hook, in the order of `trainer.hooks`. A hook that communicates must do so on all
ranks, so the order of hooks is the order of their collectives. The standard hooks are in titan/hooks/, and
docs/api.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from titan.data.base import ShardSpec, TensorBatch
from titan.data.loader import Loader
from titan.data.tokenizer import Tokenizer
from titan.hardware import Hardware
from titan.observe.clock import StepTimer, Window
from titan.observe.console import Console
from titan.observe.run_log import EventLog
from titan.resolved import ResolvedJob
from titan.tasks.base import Task
from titan.train_step import StepReport, TrainStep

_Hook = TypeVar("_Hook", bound="Hook")


@dataclass(frozen=True, kw_only=True)
class Begin:
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
    """

    step: int
    first_sample: int
    report: StepReport
    loss: float = float("nan")
    grad_norm: float = float("nan")
    scalars: AsyncScalars | None = None
    flags: dict[Hook, Sequence[float]] = field(default_factory=dict)


class Hook:
    """One concern of a run. A subclass overrides the events that it needs (see the table above).

    Attributes:
        state_key: if set, `state_dict` is saved under this name in each checkpoint's titan.json and given back on a resume.
        judges: `accept` decides about each step. The host then waits for the device in each step.
        is_first: a package's hook comes before the standard ones, not after them.
    """

    state_key = ""
    judges = False
    is_first = False

    def resume(self) -> None: ...

    def start(self) -> None: ...

    def before_step(self) -> None: ...

    def step_begin(self) -> None: ...

    def before_forward(self, batches: Sequence[TensorBatch]) -> None: ...

    def accept(self, loss: Tensor, grad_norm: Tensor) -> bool:
        return True

    def updated(self, report: StepReport) -> None: ...

    def flags(self) -> Sequence[float]:
        return ()

    def result(self, result: StepResult) -> None: ...

    def validates(self) -> bool:
        return False

    def needs_results(self) -> bool:
        return self.validates()

    def step_end(self) -> None: ...

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return {}

    def rewound(self) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RunPlace(Protocol):
    """Where a rank runs, and what it runs. Nothing here changes during a run."""

    job: ResolvedJob
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


class RunModel(Protocol):
    """The program of a run and its data."""

    task: Task
    train_step: TrainStep
    loader: Loader
    validation_loader: Loader | None
    tokenizer: Tokenizer | None  # None: of a task without text


class RunState(Protocol):
    """How far a run is, and the methods that change it. Every rank calls them together."""

    step: int  # the one that runs, or the last that is done
    first_step: int  # of this start
    last_step: int
    saved_step: int | None  # the last that a checkpoint holds
    phases: tuple[Phase, ...]
    phase: Phase  # of the newest step
    is_stopping: bool
    is_writer: bool  # this replica group writes the checkpoints; False for all groups but one
    tokens_seen: int
    result: StepResult  # the last that has reached the host
    timer: StepTimer  # from `start` on

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step over all ranks and replica groups."""
        ...

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of a step over all ranks and replica groups."""
        ...

    @property
    def is_at_border(self) -> bool:
        """Return whether the next step has another layout."""
        ...

    @property
    def logs_this_step(self) -> bool:
        """Return whether this step writes a row of metrics."""
        ...

    def advance(self, step: int, *, tokens: int) -> None:
        """Take over the counters of a checkpoint or a peer, and enter the phase of its step."""

    def rewind(self, *, failed_at: int) -> None:
        """Restart from `step`, whose state a hook has just loaded, after step `failed_at` went wrong."""

    def repeat(self, data: dict[str, Any]) -> None:
        """Take back the step that runs. The next one begins at `data`, a state of the loader."""

    def reshare(self, share: ShardSpec, *, num_groups: int, is_writer: bool) -> None:
        """Continue as a data-parallel rank of another share of the samples, in a run of `num_groups` replica groups."""

    def saved(self) -> None:
        """Record that a checkpoint holds this step."""

    def stop(self) -> None:
        """Make this step the last one of the run."""


class RunLog(Protocol):
    """The records of a run, from `start` on, and its other hooks."""

    console: Console
    events: EventLog
    hooks: list[Hook]
    is_started: bool

    def hook(self, kind: type[_Hook]) -> _Hook | None:
        """Return the first hook of a class, or None."""

    def announce(self, text: str) -> None:
        """Report a decision in the log of every rank, on the console, in events.jsonl and in status.json."""

    def write_status(self) -> None:
        """Write how far the run is to status.json."""


class RunContext(RunPlace, RunModel, RunState, RunLog, Protocol):
    """A run as its hooks see it: the trainer, or anything else with these attributes. Hooks read them, and call the methods."""
