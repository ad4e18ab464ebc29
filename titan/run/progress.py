"""A run as its hooks see it: what runs, how far it is, and the methods by which hooks change that."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan.base.hardware import Hardware
from titan.base.run_folder import write_status
from titan.base.run_writer import run_files
from titan.config.layout import Layout
from titan.config.phases import Phase, phase_at
from titan.config.schema import JobConfig
from titan.data.base import ShardSpec
from titan.data.loader import Loader
from titan.data.tokenizer import Tokenizer
from titan.observe.clock import StepTimer
from titan.observe.console import Console
from titan.observe.run_log import EventLog
from titan.run.hook import Hook, StepResult
from titan.run.supervisor import Supervisor
from titan.step.resolved import ResolvedJob
from titan.step.train_step import TrainStep
from titan.tasks.base import Task

_LOG = logging.getLogger("titan")
_Hook = TypeVar("_Hook", bound=Hook)


class RunProgress:
    """A run as its hooks see it. They read the attributes, and change the run through its methods alone.

    The trainer derives from this class, and makes the objects that it names. All ranks call a method that changes the run
    together.

    Attributes:
        step: the step that runs, or the last that is done.
        first_step: the first step of this start.
        saved_step: the last step that a checkpoint holds.
        phase: that of the newest step.
        num_groups: replica groups whose samples a step trains on.
        is_writer: whether this replica group writes the checkpoints. All groups but one do not.
        is_void: whether the step that runs does not count.
        decision: the last decision about a step that was not taken.
        result: numbers of the last step that has reached the host.
        pending: steps whose numbers are still on the device, oldest first.
        dp_rank: rank among those that read different samples.
        sizes: the model's, as its family defines them.
        tokenizer: None for a task without text.
    """

    # What runs, and where: nothing of it changes during a run.
    config: JobConfig
    job: ResolvedJob
    sizes: Any
    layout: Layout
    rank: int
    dp_rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    run_dir: Path
    supervisor: Supervisor
    # The program and its data.
    task: Task
    train_step: TrainStep
    loader: Loader
    validation_loader: Loader | None
    tokenizer: Tokenizer | None
    # How far the run is.
    hooks: list[Hook]
    phases: tuple[Phase, ...]
    phase: Phase
    first_step: int
    last_step: int
    result: StepResult
    # From `start` on.
    hardware: Hardware | None
    timer: StepTimer
    console: Console
    events: EventLog

    def __init__(self) -> None:
        """Begin before the first step."""
        self.step = self.tokens_seen = 0
        self.saved_step: int | None = None
        self.num_groups = 1
        self.is_writer = True
        self.is_stopping = self.is_open = self.is_started = False
        self.phase_number = 0
        self.is_void = False
        self.decision = ""
        self.pending: deque[StepResult] = deque()

    def hook(self, kind: type[_Hook]) -> _Hook | None:
        """Return the first hook of a class, or None."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    @property
    def changes_layout(self) -> bool:
        """Return whether the next step has another layout."""
        is_over = self.step >= self.last_step
        return not is_over and phase_at(self.phases, self.step + 1) not in self.job.own_phases

    @property
    def compiles_this_step(self) -> bool:
        """Return whether this step is the first one of this start or of a phase, which compiles."""
        return self.step in {self.first_step, *(phase.first_step for phase in self.phases)}

    @property
    def logs_this_step(self) -> bool:
        """Return whether this step writes a row of metrics. The last step of a phase does, so that no row covers two phases."""
        every = self.config.metrics.log_freq
        return self.step in (1, self.last_step, self.phase.last_step) or self.step % every == 0

    def audit_command(self, step: int) -> str:
        """Return the command that prints the documents of a step."""
        return f"titan audit {self.run_dir} --step {step} --rows"

    def announce(self, text: str) -> None:
        """Report a decision in the log of every rank, on the console, in events.jsonl and in status.json."""
        _LOG.warning(text)
        self.decision = text
        self.events.write("decision", step=self.step, text=text)
        self.write_status()

    def write_status(self) -> None:
        """Write how far the run is to status.json."""
        if self.rank == 0:
            account = self.events.account(self.timer.total_s if self.is_started else {})
            facts = {"step": self.step, "reason": self.decision, "seconds": account}
            write_status(self.run_dir, state="running", **facts)
            run_files(self.run_dir).flush()  # what could not be written before

    def advance(self, step: int, *, tokens: int) -> None:
        """Restore the counters from a checkpoint or a peer, and enter the phase of its step."""
        self.step, self.tokens_seen = step, tokens
        self._enter_phase(step)

    def rewind(self, *, failed_at: int) -> None:
        """Restart from self.step, whose state a hook has just loaded, after step `failed_at` went wrong."""
        self.is_void = True
        self.pending.clear()  # a rank that was asked to stop says so again in the next step
        for hook in self.hooks:
            hook.rewound()
        self.events.rewind(failed_at, to=self.step, spent=self.timer.total_s)
        # A new timer, since its step counts and averages were those of the failed attempt.
        self.timer = StepTimer(total_steps=self.last_step, step=self.step)

    def repeat(self, data: dict[str, Any]) -> None:
        """Undo the current step. The next one starts at `data`, a state of the loader."""
        self.is_void = True
        self.tokens_seen -= self.tokens_per_step
        self.step -= 1
        self.loader.load_state_dict(data)

    def reshare(self, share: ShardSpec, *, num_groups: int, is_writer: bool) -> None:
        """Continue as a data-parallel rank of another share of the samples, in a run of `num_groups` replica groups."""
        self.loader.set_shard(share)
        self.num_groups, self.is_writer = num_groups, is_writer

    def saved(self) -> None:
        """Record that a checkpoint holds this step."""
        self.saved_step = self.step

    def stop(self) -> None:
        """Make this step the last one of the run."""
        self.last_step = self.step

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of a step over all ranks and replica groups."""
        batch, layout = self.phase.config.training.local_batch_size, self.phase.layout
        return batch * layout.dp * layout.accumulation * self.num_groups

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step over all ranks and replica groups."""
        return self.sequences_per_step * self.phase.config.training.seq_len

    def _enter_phase(self, step: int) -> None:
        """Continue with the batch, the sequences and the data of the phase of a step. The learning rate follows the step by itself."""
        phase = phase_at(self.phases, step)
        if phase.number == self.phase_number:
            return
        self.phase, self.phase_number = phase, phase.number
        training = phase.config.training
        self.loader.change(
            batch=training.local_batch_size,
            accumulation=phase.layout.accumulation,
            seq_len=training.seq_len,
            weights=[source.weight for source in phase.config.data.sources],
        )
        self.train_step.change(phase)
        if self.is_started:
            self.timer.forget_mean()
            # No warning, for it begins as planned.
            self.console.message(str(phase), always=True)
            self.events.write("decision", step=self.step, text=str(phase))
