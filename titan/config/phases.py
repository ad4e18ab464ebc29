"""Phases of a job, from its `[[phase]]` tables: the steps of each phase, and the job with the phase's settings.

Imports no torch. Trainer, checks and simulator read the same list. A setting that a phase does not change stays as it was in
the phase before. The job of a phase has no phases itself, so every rule, estimate and simulation of a job works for it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .base import Section
from .errors import Problem, UnknownValue
from .layout import AXES, Layout, layout_of, mesh_of
from .plug_ins import door, parts_of
from .schema import JobConfig
from .schema_course import PhaseSection
from .toml import format_value

_BATCH = {"global_batch_size", "local_batch_size"}
_TRAINING = {*_BATCH, "seq_len"}
DEGREES = {*(key.rpartition(".")[2] for key in AXES.values()), "expert_parallel_degree"}
_SHOWN = {"from_step", "from_tokens", *_TRAINING}  # in the text of every phase


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A range of steps with equal settings.

    Attributes:
        number: 1, 2, ...
        first_step: number of the first step in the run, counted from 1.
        sequences: sequences of a step, over all ranks.
        layout: layout of the ranks.
        section: the table that begins the phase, or None for the first phase.
        config: the job with the settings of this phase. Its `training.steps` counts the steps of the phase.
    """

    number: int
    first_step: int
    sequences: int
    layout: Layout
    section: PhaseSection | None
    config: JobConfig

    @property
    def steps(self) -> int:
        """Return the number of steps in the phase."""
        return self.config.training.steps

    @property
    def last_step(self) -> int:
        """Return the number of the last step."""
        return self.first_step + self.steps - 1

    @property
    def mesh(self) -> str:
        """Describe the mesh. Phases with equal texts have the same."""
        return mesh_of(self.config, self.layout)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step over all ranks."""
        return self.sequences * self.config.training.seq_len

    @property
    def tokens(self) -> int:
        """Return the tokens of all steps in the phase."""
        return self.steps * self.tokens_per_step

    def steps_after(self, step: int) -> int:
        """Return the number of steps in the phase after step `step` of the run."""
        return max(0, self.last_step - max(step, self.first_step - 1))

    def __str__(self) -> str:
        """Return a line that describes the phase."""
        steps = f"steps {self.first_step:,} to {self.last_step:,}"
        size = (
            f"{self.sequences:,} sequences of {self.config.training.seq_len:,} tokens in a step"
        )
        own = self.section.model_dump(exclude_none=True, exclude=_SHOWN) if self.section else {}
        mesh = f", on {self.mesh}" * bool(DEGREES & own.keys())
        more = (f", {k} = {format_value(own[k])}" for k in own if k not in DEGREES)
        return f"phase {self.number}, {steps}: {size}{mesh}{''.join(more)}"


def sections_in(config: JobConfig, number: int) -> dict[str, Section]:
    """Return the sections that a phase reads in another way than the job has them, such as a stage out of a list."""
    pairs = [
        (name, section, section.in_phase(number))
        for name, section in config
        if isinstance(section, Section)
    ]
    return {name: own for name, section, own in pairs if own != section}


def jobs_of(config: JobConfig) -> list[JobConfig]:
    """Return the job of each phase, with the steps of the whole run, and with the source lines of the phase's own keys."""
    config = config.whole
    jobs = [job := config.model_copy(update={"phase": [], **sections_in(config, 1)})]
    lines = dict(config.source_map.locations)
    for number, section in enumerate(config.phase):
        changes: dict[str, dict[str, Any]] = {
            "training": section.model_dump(include=_TRAINING, exclude_none=True),
            "parallelism": section.model_dump(include=DEGREES, exclude_none=True),
        }
        if section.weights is not None:
            pairs = zip(job.data.sources, section.weights, strict=False)  # a rule compares them
            sources = [source.model_copy(update={"weight": weight}) for source, weight in pairs]
            changes["data"] = {"sources": sources}
        updates: dict[str, Section] = sections_in(config, number + 2)
        for name, values in changes.items():
            updates[name] = getattr(job, name).model_copy(update=values)
            for key in values:
                if place := lines.get(f"phase[{number}].{key}"):
                    lines[f"{name}.{key}"] = place
        jobs.append(job := job.model_copy(update=updates))
        job._source_map = replace(config.source_map, locations=dict(lines))
    return jobs


def of_each_phase(
    config: JobConfig, problems_of: Callable[[JobConfig], Iterable[Problem]]
) -> list[Problem]:
    """Return the problems of a job and of the jobs of its later phases, each once.

    A problem of a later phase has that phase's line, or names the phase.
    """
    found = {problem: problem for problem in problems_of(config)}
    try:
        later = jobs_of(config)[1:]
    except UnknownValue:
        later = []
    for number, job in enumerate(later, 2):
        for problem in problems_of(job):
            own = problem.key.startswith("phase[")
            message = problem.message if own else f"in phase {number}, {problem.message}"
            # Most rules find the same in each phase.
            found.setdefault(problem, replace(problem, message=message))
    return [*found.values()]


def phases_of(config: JobConfig, *, world_size: int) -> list[Phase]:
    """Return the phases of a job on `world_size` ranks. A job without `[[phase]]` has one phase.

    A phase that names degrees and no batch keeps the sequences of a step, whatever its data-parallel degree.
    """
    phases: list[Phase] = []
    kept = -1  # sequences of a step that a new layout keeps
    for section, job in zip([None, *config.phase], jobs_of(config), strict=True):
        first_step = 1
        if section is not None:
            before = phases[-1]
            names = {*section.model_dump(exclude_none=True)}
            if names & _BATCH:
                kept = -1
            elif names & DEGREES:
                kept = before.sequences
            first_step = section.from_step or before.first_step + 1
            if section.from_tokens is not None:
                # The phase begins at the first step before which this many tokens have been trained on.
                missing = section.from_tokens - sum(phase.tokens for phase in phases[:-1])
                first_step = before.first_step - (-missing // before.tokens_per_step)
            phases[-1] = _ending(before, first_step)
        if kept != -1 and job.training.global_batch_size == -1:
            training = job.training.model_copy(update={"global_batch_size": kept})
            job = job.model_copy(update={"training": training})
        training = job.training
        size, layout = training.global_batch_size, layout_of(job, world_size)
        dp = max(1, layout.dp)  # 0 if the degrees do not fit
        phase = Phase(
            number=len(phases) + 1,
            first_step=first_step,
            sequences=training.local_batch_size * dp if size == -1 else size,
            layout=layout,
            section=section,
            config=job,
        )
        phases.append(_ending(phase, training.steps + 1))
    return phases


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step. Steps before the first belong to the first phase, those past the end to the last."""
    return [phase for phase in phases if phase.first_step <= max(step, 1)][-1]


def _ending(phase: Phase, end: int) -> Phase:
    """Return a phase that ends before step `end`."""
    update = {"steps": end - phase.first_step}
    training = phase.config.training.model_copy(update=update)
    return replace(phase, config=phase.config.model_copy(update={"training": training}))


def sequence_lengths(config: JobConfig) -> set[int]:
    """Return the sequence lengths of all phases, in tokens."""
    return {job.training.seq_len for job in jobs_of(config)}


def longest_sequence(config: JobConfig) -> int:
    """Return the tokens of the longest sequence that any phase trains on."""
    return max(sequence_lengths(config))


@door("estimate")
class EstimateMemory(Protocol):
    """Function that estimates the memory of the fullest rank of a job, in GiB by category, with the "total"."""

    def __call__(
        self, config: JobConfig, model_config: Any, layout: Layout, /
    ) -> dict[str, float]: ...


def memory_of(phases: Sequence[Phase], model: Any) -> list[dict[str, float]]:
    """Return the estimated memory of the fullest rank in each phase, in GiB by category, with the "total".

    Args:
        phases: the phases of a job.
        model: sizes of the model.

    Returns:
        The estimates of the installed part. Without one, an empty list.
    """
    return [
        estimate(phase.config, model, phase.layout)
        for estimate in parts_of(EstimateMemory)
        for phase in phases
    ]
