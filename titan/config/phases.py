"""Resolve the `[[phase]]` tables of a job: which steps each phase has, and the job as it is in each of them. Imports no torch.

Trainer, checks and simulator read the same list. What a phase does not set stays as it was in the phase before. A phase's job
has no phases of its own, so that every rule, estimate and simulation of a job holds for it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .errors import SourceMap, UnknownValue
from .schema import JobConfig
from .schema_run import PhaseSection
from .toml import format_value

_TRAINING = ("global_batch_size", "local_batch_size", "seq_len")
_SHOWN = {"from_step", "from_tokens", *_TRAINING}  # in the text of every phase


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Hold a run of steps with equal settings.

    Args:
        number: 1, 2, ...
        first_step, last_step: counted from 1, as in the run. There are no steps if the last comes before the first.
        first_token: tokens of the steps before it.
        sequences: of a step, over all ranks.
        section: the table that begins the phase; None: the first phase, which none begins.
        config: the job with the settings of this phase, whose `training.steps` are its own.
    """

    number: int
    first_step: int
    last_step: int
    first_token: int
    sequences: int
    section: PhaseSection | None
    config: JobConfig

    @property
    def steps(self) -> int:
        """Return how many steps there are."""
        return self.last_step - self.first_step + 1

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step over all ranks."""
        return self.sequences * self.config.training.seq_len

    @property
    def tokens(self) -> int:
        """Return the tokens of all steps."""
        return self.steps * self.tokens_per_step

    def steps_after(self, step: int) -> int:
        """Return how many steps there are after a step of the run."""
        return max(0, self.last_step - max(step, self.first_step - 1))

    def __str__(self) -> str:
        """Return what the phase is, in a line."""
        text = f"phase {self.number}, steps {self.first_step:,} to {self.last_step:,}: {self.sequences:,} sequences"
        text = f"{text} of {self.config.training.seq_len:,} tokens in a step"
        own = self.section.model_dump(exclude_none=True, exclude=_SHOWN) if self.section else {}
        return ", ".join([text, *(f"{key} = {format_value(own[key])}" for key in own)])

    @property
    def weights(self) -> list[float]:
        """Return the weights of data.sources; empty without such a list."""
        return [source.weight for source in self.config.data.sources]


def jobs_of(config: JobConfig) -> list[JobConfig]:
    """Return the job as it is in each phase, with the steps of the whole run and the lines of the phase's own keys."""
    job = config.model_copy(update={"phase": []})
    jobs = [job]
    for number, section in enumerate(config.phase):
        changes = {key: getattr(section, key) for key in _TRAINING}
        changes = {key: value for key, value in changes.items() if value is not None}
        updates: dict[str, Any] = {"training": job.training.model_copy(update=changes)}
        if section.weights is not None and len(section.weights) == len(job.data.sources):
            pairs = zip(job.data.sources, section.weights, strict=True)
            sources = [source.model_copy(update={"weight": weight}) for source, weight in pairs]
            updates["data"] = job.data.model_copy(update={"sources": sources})
        lines, before = job.source_map.locations, config.source_map
        own = {
            f"training.{key}": lines[place]
            for key in changes
            if (place := f"phase[{number}].{key}") in lines
        }
        job = job.model_copy(update=updates)
        job._source_map = SourceMap(before.file, before.line, lines | own)
        jobs.append(job)
    return jobs


def later_jobs(config: JobConfig) -> list[JobConfig]:
    """Return the jobs of all phases but the first, which a check of the job itself covers. None, if what they are is unknown."""
    try:
        return jobs_of(config)[1:]
    except UnknownValue:
        return []


def phases_of(config: JobConfig, *, dp: int) -> list[Phase]:
    """Return the phases of a job on `dp` data-parallel ranks, of which a job without `[[phase]]` has one."""
    phases: list[Phase] = []
    for section, job in zip([None, *config.phase], jobs_of(config), strict=True):
        training = job.training
        sequences = training.global_batch_size
        if sequences == -1:
            sequences = training.local_batch_size * dp
        first_step, first_token = 1, 0
        if section is not None:
            before = phases.pop()
            first_step = section.from_step or 1
            if section.from_tokens is not None:
                # The first step before which so many tokens are trained on.
                missing = section.from_tokens - before.first_token
                first_step = before.first_step + -(-missing // before.tokens_per_step)
            phases.append(_ending(before, first_step - 1))
            first_token = before.first_token + phases[-1].tokens
        phase = Phase(
            number=len(phases) + 1,
            first_step=first_step,
            last_step=0,
            first_token=first_token,
            sequences=sequences,
            section=section,
            config=job,
        )
        phases.append(_ending(phase, training.steps))
    return phases


def _ending(phase: Phase, last_step: int) -> Phase:
    steps = last_step - phase.first_step + 1
    training = phase.config.training.model_copy(update={"steps": steps})
    job = phase.config.model_copy(update={"training": training})
    return replace(phase, last_step=last_step, config=job)


def longest_sequence(config: JobConfig) -> int:
    """Return the tokens of the longest sequence that any phase trains on."""
    return max(job.training.seq_len for job in jobs_of(config))
