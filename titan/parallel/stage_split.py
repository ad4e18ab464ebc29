"""Split of a model into pipeline stages. Imports no torch, since the checks of a job file read it.

An example: 8 layers on 4 stages, with first_less = last_less = 1, weigh 10 layers. Each stage gets 2, and the two left over go
to the middle stages. The stages have 1, 3, 3 and 1 layers; the embedding is on the first one, and norm and output on the last one.
"""

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
    """Modules of each stage, and the schedule that runs them.

    Attributes:
        modules: names of the modules of each stage.
        schedule_name: name of the schedule.
        custom: the schedule, if it was read from a file.
        num_ranks: number of pipeline ranks.
        num_microbatches: number of microbatches of a step.
    """

    modules: list[list[str]]
    schedule_name: str
    custom: Schedule | None
    num_ranks: int
    num_microbatches: int

    @cached_property
    def schedule(self) -> Schedule:
        """Return the order of every rank's actions. Imports torch, which knows the orders."""
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
    """Split a model into stages, or raise SplitError with the nearest numbers that work.

    Args:
        num_layers: number of layers of the model.
        num_ranks: number of pipeline ranks.
        num_microbatches: number of microbatches of a step.
        schedule: name of the schedule. Raises ValueError for an unknown one.
        csv: a custom schedule instead of `schedule`. Raises ValueError if the file holds none.
        layers_per_stage: upper limit, from which the number of stages follows. None: the schedule's one or two for each rank.
        first_less: number of layers that the embedding counts for.
        last_less: number of layers that norm and output layer count for.
        modules: names for each stage, instead of an even split.
        ends: names of the modules before and after the blocks, which go to the first and to the last stage.
    """
    custom = read_schedule(csv) if csv else None
    # Embedding and output layer count as layers here, too. The division rounds up.
    by_layers = layers_per_stage and -(
        -(num_layers + first_less + last_less) // layers_per_stage
    )
    # The number of stages comes from the file, the named modules, the layers of each stage, or the
    # schedule's habit, in this order.
    if custom:
        num_stages = custom.num_stages
        for number, wanted, noun in (
            (custom.num_ranks, num_ranks, "ranks"),
            (custom.num_microbatches, num_microbatches, "microbatches"),
        ):
            if number != wanted:
                raise SplitError(
                    f"{csv} is a schedule for {number} {noun}, and there are {wanted}"
                )
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
    named = sum(map(bool, modules or ()))
    if modules and named != num_stages:
        raise SplitError(f"modules are named for {named} stages, the schedule has {num_stages}")
    # Check the schedule first: it knows which numbers of stages are possible.
    if not custom:
        check_schedule(
            schedule,
            num_ranks=num_ranks,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
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
    """Return the names of each stage's modules, as even as can be. The names are those in models/.

    The remainder of the division goes to the middle stages, one layer each, later stages first, since earlier stages hold more
    microbatches in flight; then to the first stage. It does not go to the last stage, which has the logits.

    Args:
        num_layers: number of layers of the model.
        num_stages: number of stages.
        first_less: number of layers that the embedding, with all of `ends.first`, counts for.
        last_less: number of layers that norm and output layer, with all of `ends.last`, count for.
        ends: names of the modules before and after the blocks.

    Raises:
        SplitError: there are too many stages, or an end counts for more than its stage has room for.
    """
    weight = num_layers + first_less + last_less
    each, rest = divmod(weight, num_stages)
    if each == 0:
        raise SplitError(
            f"{num_stages} stages are more than {num_layers} layers, embedding ({first_less}) and output ({last_less}) "
            f"= {weight}; use {weight} stages or fewer"
        )
    # Counts of layers. The first and the last stage get the same share, from which the layers that embedding and output
    # count for are subtracted.
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
