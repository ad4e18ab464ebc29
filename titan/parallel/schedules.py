"""Pipeline schedules: the order of each rank's work, and its cost in idle time and memory.

A pipeline cuts a model into stages and a batch into microbatches. A `Schedule` lists the actions of each rank in order. An action
is written as in torch and its CSV files, stage, kind, microbatch: "0F3" is the forward pass of microbatch 3 through stage 0.

    F  forward                               1 unit of time
    B  backward, whole                       2
    I  backward, gradients of the input      1   the previous stage waits for it
    W  backward, gradients of the weights    1   can wait, and so fills bubbles (zero bubble)

GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503), interleaved 1F1B (arXiv:2104.04473), breadth first
(arXiv:2211.05953), zero bubble and ZBV (arXiv:2401.10241), DualPipeV (arXiv:2412.19437). The orders of all but the first two are
torch's, which a class computes without running anything. Nothing here needs a process group, and only these orders import
torch: the simulator and the tests read the schedules that pipeline.py runs, and `titan sim --csv` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}
_ACTION = r"(\d{1,9})([FBIW])(\d{1,9})"
_CELL = re.compile(rf"{_ACTION}|\({_ACTION}(;{_ACTION})*\)OVERLAP_F_B")


class SplitError(ValueError):
    """Numbers of stages, ranks and microbatches that do not fit each other. `kind` says which one to change."""

    def __init__(
        self, message: str, kind: Literal["stages", "microbatches", "first", "last"] = "stages"
    ) -> None:
        super().__init__(message)
        self.kind = kind


class Action(NamedTuple):
    """One computation of a rank: stage, kind and microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Span(NamedTuple):
    """Time in which an action runs, in units of a forward pass of one microbatch through one stage."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of the actions of each rank."""

    name: str
    num_stages: int
    num_microbatches: int
    order: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks in the pipeline."""
        return len(self.order)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank computes, first to last."""
        return sorted({action.stage for action in self.order[rank]})

    @property
    def splits_backward(self) -> bool:
        """Return whether some backward passes are split into I and W."""
        return any(action.kind == "I" for actions in self.order for action in actions)

    def peak_in_flight(self, rank: int) -> int:
        """Return the largest number of microbatches whose activations a rank holds at once, summed over its stages.

        A microbatch is in flight in a stage from its F to its B or W.
        """
        peak = current = 0
        for action in self.order[rank]:
            current += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            peak = max(peak, current)
        return peak

    def timeline(self) -> list[list[Span]]:
        """Return the time of each rank's actions, if each starts as soon as its rank and its inputs are ready.

        Raises ValueError for an order in which ranks wait for each other forever.
        """
        ends: dict[Action, int] = {}
        spans: list[list[Span]] = [[] for _ in self.order]
        # Ranks advance in turn, each as far as its inputs are known, until a round changes nothing.
        progress = True
        while progress:
            progress = False
            for actions, done in zip(self.order, spans, strict=True):
                while len(done) < len(actions):
                    action = actions[len(done)]
                    ready = self._ready_at(action, ends)
                    if ready is None:
                        break
                    # A rank does one thing at a time.
                    start = max(ready, done[-1].end if done else 0)
                    ends[action] = start + COSTS[action.kind]
                    done.append(Span(action, start, ends[action]))
                    progress = True
        stuck = [
            f"rank {rank} at {actions[len(done)]}"
            for rank, (actions, done) in enumerate(zip(self.order, spans, strict=True))
            if len(done) < len(actions)
        ]
        if stuck:
            raise ValueError(
                f"the schedule cannot run: {', '.join(stuck)} would wait forever; each F needs the F of the stage "
                "before, each B or I that of the stage after, and each W its I"
            )
        return spans

    def bubble_fraction(self) -> float:
        """Return the idle share of the ranks' time between the first action and the last."""
        spans = self.timeline()
        length = max(rank[-1].end for rank in spans)
        busy = sum(COSTS[action.kind] for actions in self.order for action in actions)
        return 1 - busy / (length * self.num_ranks)

    def _ready_at(self, action: Action, ends: dict[Action, int]) -> int | None:
        """Return the time at which the inputs of an action are ready, or None if it is not known yet."""
        stage, kind, microbatch = action
        if kind == "W":
            return ends.get(Action(stage, "I", microbatch))
        if kind == "F":
            return 0 if stage == 0 else ends.get(Action(stage - 1, "F", microbatch))
        # A backward pass needs its own forward pass, and the gradient of the stage after it.
        forward = ends.get(Action(stage, "F", microbatch))
        if stage == self.num_stages - 1 or forward is None:
            return forward
        # That stage may compute a whole backward pass, or the part for its input.
        after = (ends.get(Action(stage + 1, kind, microbatch)) for kind in "BI")
        return next((end for end in after if end is not None), None)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Numbers that a schedule accepts.

    stages: stages of each rank, None for any number. rounds: microbatches go in equal rounds of about one for each rank.
    fills: there is at least one microbatch for each stage.
    """

    stages: int | None
    style: Literal["loop", "v"] = "loop"
    splits: bool = False
    rounds: bool = False
    fills: bool = False


_SCHEDULES = {
    "GPipe": _Rules(stages=1),
    "1F1B": _Rules(stages=1, fills=True),
    "Interleaved1F1B": _Rules(stages=None, rounds=True),
    "LoopedBFS": _Rules(stages=None),
    "InterleavedZeroBubble": _Rules(stages=None, splits=True, rounds=True),
    "ZBVZeroBubble": _Rules(stages=2, style="v", splits=True),
    "DualPipeV": _Rules(stages=2, style="v", splits=True, fills=True),
}
# torch's Interleaved1F1B includes this former class: the number of microbatches need not be a multiple of the ranks.
_ALIASES = {"flexibleinterleaved1f1b": "Interleaved1F1B"}
# torch's classes that define no order. TorchTitan's jobs name them beside a CSV, which defines it.
_RUN_A_FILE = ("pipelineschedulemulti", "pipelineschedulesingle", "pipelinescheduleruntime")


def canonical_schedule(name: str, *, csv: Path | str | None = None) -> str:
    """Return the name as this module spells it, for any letter case, with or without hyphens.

    Args:
        name: name of a schedule.
        csv: the file that gives the order instead. The name may then be that of torch's class that runs files.

    Raises:
        ValueError: the name is unknown.
    """
    key = name.lower().replace("-", "").replace("_", "")
    names = {known.lower(): known for known in _SCHEDULES} | _ALIASES
    if key in names:
        return names[key]
    if key in _RUN_A_FILE:
        if csv:
            return name
        raise ValueError(
            f"schedule {name} runs the order of a file; set pipeline_parallel_schedule_csv, or use "
            f"one of {', '.join(_SCHEDULES)}"
        )
    match = get_close_matches(key, names, n=1)
    hint = f"did you mean '{names[match[0]]}'? There are" if match else "there are"
    raise ValueError(f"unknown pipeline schedule '{name}'; {hint} {', '.join(_SCHEDULES)}")


def splits_backward(name: str, *, csv: Path | str | None = None) -> bool:
    """Return whether a schedule computes gradients of inputs and of weights separately.

    Blocks are then compiled in two parts (`apply_compile`).

    Args:
        name: name of a schedule. Raises ValueError if it is unknown.
        csv: the file that gives the order instead of the name.
    """
    return (
        read_schedule(csv).splits_backward
        if csv
        else _SCHEDULES[canonical_schedule(name)].splits
    )


def stages_per_rank(name: str) -> int:
    """Return the default number of stages of each rank."""
    return _SCHEDULES[canonical_schedule(name)].stages or 2


def stage_numbers(
    rank: int, *, num_ranks: int, stages_per_rank: int, style: Literal["loop", "v"] = "loop"
) -> list[int]:
    """Return the stages of a rank.

    "loop" deals them out in turn. "v" goes down the ranks and back up, so that the first rank has the first and the last stage.
    """
    if style == "v":
        assert stages_per_rank == 2, "a V has two arms"
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + loop * num_ranks for loop in range(stages_per_rank)]


def check_schedule(
    name: str, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> None:
    """Raise SplitError for numbers that do not fit, with the nearest numbers that do.

    Args:
        name: name of a schedule. Raises ValueError if it is unknown.
        num_ranks: number of pipeline ranks.
        num_stages: number of stages on all ranks.
        num_microbatches: number of microbatches of a step.
    """
    name = canonical_schedule(name)
    rules = _SCHEDULES[name]
    if rules.stages and num_stages != rules.stages * num_ranks:
        plural = "s" * (rules.stages > 1)
        raise SplitError(
            f"schedule {name} has {rules.stages} stage{plural} on each rank: {num_ranks} ranks take "
            f"{rules.stages * num_ranks} stages, not {num_stages}"
        )
    if num_stages % num_ranks:
        near = [n for n in (num_stages // num_ranks, num_stages // num_ranks + 1) if n]
        fixes = " or ".join(str(n * num_ranks) for n in near)
        raise SplitError(
            f"{num_stages} stages cannot be shared evenly by {num_ranks} ranks; {fixes} would do"
        )
    if rules.fills and num_microbatches < num_stages:
        raise SplitError(
            f"schedule {name} needs a microbatch for each of its {num_stages} stages, not "
            f"{num_microbatches}; use {num_stages} or more",
            "microbatches",
        )
    # Search downwards and upwards for the nearest numbers that fit.
    if rules.rounds and not _fits_rounds(num_microbatches, num_ranks):
        near = [
            next(n for n in numbers if _fits_rounds(n, num_ranks))
            for numbers in (range(num_microbatches, 0, -1), range(num_microbatches, 10**9))
        ]
        raise SplitError(
            f"schedule {name} sends microbatches in equal rounds of {num_ranks} or more, one for each rank: "
            f"{num_microbatches} do not divide into {num_microbatches // num_ranks} rounds; "
            f"{near[0]} or {near[1]} would do",
            "microbatches",
        )


def _fits_rounds(num_microbatches: int, num_ranks: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def build_schedule(
    name: str, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> Schedule:
    """Build a schedule by its name. It has the arguments and errors of `check_schedule`."""
    check_schedule(
        name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )
    name = canonical_schedule(name)
    if name == "GPipe":
        order = [
            [Action(rank, kind, m) for kind in "FB" for m in range(num_microbatches)]
            for rank in range(num_ranks)
        ]
    elif name == "1F1B":
        order = [
            _one_forward_one_backward(r, num_ranks, num_microbatches) for r in range(num_ranks)
        ]
    else:
        order = _torch_order(name, num_ranks, num_stages, num_microbatches)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        order=tuple(map(tuple, order)),
    )


def _one_forward_one_backward(
    stage: int, num_stages: int, num_microbatches: int
) -> list[Action]:
    """Build 1F1B without torch, whose list (not its execution) starts the last rank at microbatch 1."""
    forward = [Action(stage, "F", m) for m in range(num_microbatches)]
    backward = [Action(stage, "B", m) for m in range(num_microbatches)]
    # A stage runs ahead by one microbatch for each stage that follows.
    ahead = num_stages - 1 - stage
    # Then one forward and one backward in turn, until the forward passes are used up.
    steady = [
        action for pair in zip(forward[ahead:], backward, strict=False) for action in pair
    ]
    return forward[:ahead] + steady + backward[num_microbatches - ahead :]


def _torch_order(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[Action]]:
    """Return the order that torch's class computes at construction."""
    from torch import nn
    from torch.distributed.pipelining.schedules import get_schedule_class

    # The class asks its stages for a few numbers at construction, and runs nothing.
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=nn.Module(),
        )
        for stage in stage_numbers(
            0,
            num_ranks=num_ranks,
            stages_per_rank=num_stages // num_ranks,
            style=_SCHEDULES[name].style,
        )
    ]
    # Built for rank 0. The class computes the orders of all ranks.
    torch_schedule = get_schedule_class(name)(stages, num_microbatches)
    return [
        list(_computations(torch_schedule.pipeline_order[rank])) for rank in range(num_ranks)
    ]


def _computations(actions: Iterable[Any]) -> Iterable[Action]:
    """Convert torch's actions to titan's, without idle slots.

    The two computations of an overlapped pair follow each other, in the order in which torch runs them.
    """
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computations(action.sub_actions)
        else:
            kind = action.computation_type.value
            yield Action(action.stage_index, kind, action.microbatch_index)


def read_schedule(file: Path | str) -> Schedule:
    """Read a custom schedule: a CSV with a line for each rank and an action in each cell. Empty cells are idle.

    Sends and receives are added when it runs.

    Raises:
        ValueError: the file, at a line that the message names, is no schedule that can run.
    """
    file = Path(file)
    from titan.base.untrusted import read_text  # needs pydantic, which helpers alone do not

    rows = (line.split(",") for line in read_text(file).splitlines())
    order = [_read_line(row, place=f"{file}:{n}") for n, row in enumerate(rows, 1)]
    order = [actions for actions in order if actions]
    if not order:
        raise ValueError(
            f"{file}: no actions in it; expected a line of cells like 0F0,0F1,0B0 for each rank"
        )
    schedule = Schedule(
        name=file.name,
        num_stages=1 + max(action.stage for actions in order for action in actions),
        num_microbatches=1 + max(action.microbatch for actions in order for action in actions),
        order=tuple(order),
    )
    # First check that no action is missing, then that the order can run.
    _check_complete(schedule, file)
    try:
        schedule.timeline()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return schedule


def _read_line(row: Sequence[str], *, place: str) -> tuple[Action, ...]:
    cells = [cell.strip() for cell in row if cell.strip()]
    for cell in cells:
        if not _CELL.fullmatch(cell):
            raise ValueError(
                f"{place}: {cell[:40]!a} is no computation; expected a stage, one of F, B, I, W, and a microbatch, as in "
                "0F0 (sends, receives and gathering of parameters are added by themselves)"
            )
    return tuple(
        Action(int(s), k, int(m)) for cell in cells for s, k, m in re.findall(_ACTION, cell)
    )


def _check_complete(schedule: Schedule, file: Path) -> None:
    """Check that every microbatch passes every stage forward and backward once, and that a stage has one rank."""
    ranks = {
        stage: rank for rank in range(schedule.num_ranks) for stage in schedule.stages_of(rank)
    }
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            if ranks[action.stage] != rank:
                raise ValueError(
                    f"{file}: stage {action.stage} is on ranks {rank} and {ranks[action.stage]}; a stage has one rank"
                )
    # For each stage and microbatch the kinds in their order, as a string such as "FIW".
    kinds: dict[tuple[int, int], str] = {}
    for actions in schedule.order:
        for stage, kind, microbatch in actions:
            kinds[stage, microbatch] = kinds.get((stage, microbatch), "") + kind
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            if (actions := kinds.get((stage, microbatch), "")) not in ("FB", "FIW"):
                raise ValueError(
                    f"{file}: microbatch {microbatch} has the actions '{actions}' in stage {stage}; expected F and then "
                    "B, or F, I and W"
                )
