"""Decide which modules make up which pipeline stage. Imports no torch: the checks of a job file ask
the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .schedules import (
    Schedule,
    SplitError,
    build_schedule,
    check_schedule,
    read_schedule,
    stages_per_rank,
)
from .traits import USUAL_ENDS, ModelEnds


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Hold the names of each stage's modules, and the schedule that runs them. `custom` if it was
    read from a file."""

    modules: list[list[str]]
    schedule_name: str
    custom: Schedule | None
    num_ranks: int
    num_microbatches: int

    @cached_property
    def schedule(self) -> Schedule:
        """Return which rank does what when; imports torch, which knows the orders."""
        return self.custom or build_schedule(
            self.schedule_name,
            num_ranks=self.num_ranks,
            num_stages=len(self.modules),
            num_microbatches=self.num_microbatches,
        )


def split_stages(
    num_layers: int,
    *,
    num_ranks: int,
    num_microbatches: int,
    schedule: str = "1F1B",
    csv: Path | str | None = None,
    layers_per_stage: int | None = None,
    first_less: int = 1,
    last_less: int = 1,
    modules: Sequence[Sequence[str]] | None = None,
    ends: ModelEnds = USUAL_ENDS,
) -> StageSplit:
    """Split a model into stages. Raises SplitError, with the nearest numbers that would work; ValueError for the CSV or a name.

    Args:
        csv: a custom schedule instead of `schedule`.
        layers_per_stage: makes as many stages as that takes; None: one or two for each rank, as the schedule has.
        first_less, last_less: how many layers embedding and output layer count for.
        modules: names for each stage, instead of an even split.
        ends: names of the modules that come before and after the blocks, and go to the first and to the last stage.
    """
    custom = read_schedule(csv) if csv else None
    # Embedding and output layer count as layers here, too. The division rounds up.
    by_layers = layers_per_stage and -(-(num_layers + first_less + last_less) // layers_per_stage)
    # The number of stages comes from the file, the named modules, the layers of each stage, or the
    # schedule's habit, in this order.
    if custom:
        num_stages = custom.num_stages
        for number, wanted, noun in (
            (custom.num_ranks, num_ranks, "ranks"),
            (custom.num_microbatches, num_microbatches, "microbatches"),
        ):
            if number != wanted:
                raise SplitError(f"{csv} is a schedule for {number} {noun}, and there are {wanted}")
        if by_layers and not modules and by_layers != num_stages:
            raise SplitError(
                f"{csv} has {num_stages} stages, and {layers_per_stage} layers in each would make {by_layers}"
            )
    elif modules:
        num_stages = len(modules)
    elif by_layers:
        num_stages = by_layers
    else:
        num_stages = num_ranks * stages_per_rank(schedule)
    if modules and len(modules) != num_stages:
        raise SplitError(
            f"modules are named for {len(modules)} stages, the schedule has {num_stages}"
        )
    # The schedule first: it knows what numbers of stages are possible at all.
    if not custom:
        check_schedule(
            schedule, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
        )
    return StageSplit(
        modules=[list(names) for names in modules]
        if modules
        else split_modules(
            num_layers,
            num_stages=num_stages,
            first_less=first_less,
            last_less=last_less,
            ends=ends,
        ),
        schedule_name=schedule,
        custom=custom,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
    )


def split_modules(
    num_layers: int,
    *,
    num_stages: int,
    first_less: int = 1,
    last_less: int = 1,
    ends: ModelEnds = USUAL_ENDS,
) -> list[list[str]]:
    """Return the names of each stage's modules, named as in models/, as even as can be.

    The embedding, with all in `ends.first`, counts as `first_less` layers; norm and output layer, with all in `ends.last`, as
    `last_less`. What does not divide goes
    one by one to the middle stages, later ones first, since earlier ones hold more microbatches in flight; then to
    the first stage, and not to the last, which has the logits.
    """
    weight = num_layers + first_less + last_less
    each, rest = divmod(weight, num_stages)
    if each == 0:
        raise SplitError(
            f"{num_stages} stages are more than {num_layers} layers, embedding ({first_less}) and output ({last_less}) "
            f"= {weight}; use {weight} stages or fewer"
        )
    # Counted in layers: the ends first get their share, and then give up what embedding and output
    # take of it.
    counts = [each] * num_stages
    for stage in [*range(num_stages - 2, 0, -1), 0][:rest]:
        counts[stage] += 1
    counts[0] -= first_less
    counts[-1] -= last_less
    for stage, less in ((0, first_less), (num_stages - 1, last_less)):
        if counts[stage] < 0:
            raise SplitError(
                f"stage {stage} of {num_stages} has room for {counts[stage] + less} layers, less than the {less} that "
                f"{'the embedding counts' if stage == 0 else 'norm and output count'} for; use {each} or less for that, "
                "or fewer stages",
                "first" if stage == 0 else "last",
            )
    names = [[] for _ in counts]
    layers = iter(range(num_layers))
    for stage, count in enumerate(counts):
        names[stage] = [f"layers.{next(layers)}" for _ in range(count)]
    names[0][:0] = ends.first
    names[-1] += ends.last
    return names
