"""How far a run is, and the methods by which its hooks change that (titan.hook.RunState)."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

from titan.config.layout import Layout
from titan.config.phases import Phase, phase_at
from titan.config.schema import JobConfig
from titan.data.base import ShardSpec
from titan.data.loader import Loader
from titan.hook import Hook, StepResult
from titan.observe.clock import StepTimer
from titan.observe.console import Console
from titan.observe.run_log import EventLog
from titan.resolved import ResolvedJob
from titan.run_folder import write_status
from titan.run_writer import run_files
from titan.train_step import TrainStep

_LOG = logging.getLogger("titan")
_Hook = TypeVar("_Hook", bound=Hook)


class RunProgress:
    """Counters and phase of a run. The trainer derives from this class, and makes the objects that it names."""

    config: JobConfig
    job: ResolvedJob
    layout: Layout
    rank: int
    run_dir: Path
    loader: Loader
    train_step: TrainStep
    hooks: list[Hook]
    phases: tuple[Phase, ...]
    phase: Phase  # of the newest step
    # From `start` on.
    timer: StepTimer
    console: Console
    events: EventLog

    def __init__(self) -> None:
        """Begin before the first step."""
        self.step = self.tokens_seen = 0
        self.saved_step: int | None = None  # the last step that a checkpoint holds
        self.num_groups = 1  # replica groups whose samples a step trains on
        self.is_writer = True
        self.is_stopping = self.is_started = False
        self.is_void = False  # the step that runs does not count
        self.decision = ""  # the last about a step that was not taken
        # Steps whose numbers are still on the device, oldest first.
        self.pending: deque[StepResult] = deque()

    def hook(self, kind: type[_Hook]) -> _Hook | None:
        """Return the first hook of a class, or None."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    @property
    def is_at_border(self) -> bool:
        """Return whether the next step has another layout."""
        is_over = self.step >= self.last_step
        return not is_over and phase_at(self.phases, self.step + 1) not in self.job.own_phases

    @property
    def logs_this_step(self) -> bool:
        """Return whether this step writes a row of metrics. The last step of a phase does, so that no row covers two phases."""
        every = self.config.metrics.log_freq
        return self.step in (1, self.last_step, self.phase.last_step) or self.step % every == 0

    def announce(self, text: str) -> None:
        """Report a decision in the log of every rank, on the console, in events.jsonl and in status.json."""
        _LOG.warning(text)
        self.decision = text
        self.events.write("decision", step=self.step, text=text)
        self.write_status()

    def write_status(self) -> None:
        """Write how far the run is to status.json."""
        if self.rank == 0:
            write_status(self.run_dir, state="running", step=self.step, reason=self.decision)
            run_files(self.run_dir).flush()  # what could not be written before

    def advance(self, step: int, *, tokens: int) -> None:
        """Take over the counters of a checkpoint or a peer, and enter the phase of its step."""
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
        """Take back the step that runs. The next one begins at `data`, a state of the loader."""
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
        if phase is getattr(self, "phase", None):
            return
        self.phase, training = phase, phase.config.training
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
