"""Memory of one rank: its trace's allocations through the allocator's model, and the memory in use at the peak.

The model is built, a step makes the optimizer's state, and two more steps run: the peak is that of
the whole, as torch.cuda.max_memory_reserved() reports it. Memory outside of the allocator (driver
context, NCCL's buffers) is a constant of the profile and counts towards "does it fit". Blocks that
outlive the step in which they are made are matched with blocks of the previous step, which the step
frees. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import nlargest

from titan.sim.price.profiles import Profile
from titan.sim.record.segments import any_layer
from titan.sim.record.trace import (
    CATEGORIES,
    COMPUTE_STREAM,
    Allocate,
    Category,
    Free,
    Scope,
    Trace,
    Transfer,
    scope_of,
)

from .allocator import Allocator, OutOfMemory

# Parts into which the timeline divides a step, enough for a chart.
_NUM_POINTS = 400
_NOWHERE = Scope("setup")
_WORKSPACE = -1
"""Number of the block that cuBLAS allocates with the first matmul; a trace has none below 0."""


@dataclass(frozen=True)
class MemoryPoint:
    """Memory in use at a moment of a step.

    Attributes:
        number: number of the event among all.
        position: 0 to 1, by the order in which the host allocates.
        phase: phase of the step.
        by_category: bytes by category.
    """

    number: int
    position: float
    phase: str
    by_category: dict[Category, int]


@dataclass
class MemoryReport:
    """Memory that one rank needs. Sizes are as the allocator rounds them.

    Attributes:
        rank: global rank.
        peak_active_bytes: most memory in use.
        peak_reserved_bytes: most memory that the allocator takes from the device.
        at: place in the program at the peak of active memory.
        timeline: memory over the last step.
        outside_bytes: memory outside of the allocator.
        capacity_bytes: memory of the device.
        usable_bytes: memory of the device without the margin.
        runs: whether the run goes through.
        num_retries: number of times that the allocator gives back its cache. Above 0 the run is
            slow.
        failure: place where it runs out of memory, if it does.
        by_both: memory in use at the peak, by category and module.
        by_stream: memory that each stream's pools hold at the end, by what the stream is for. Free
            memory of one serves no other.
    """

    rank: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    at: Scope
    timeline: list[MemoryPoint]
    outside_bytes: int = 0
    capacity_bytes: int = 0
    usable_bytes: int = 0
    runs: bool = True
    num_retries: int = 0
    failure: str = ""
    by_both: Counter[tuple[Category, str]] = field(default_factory=Counter)
    by_stream: dict[str, int] = field(default_factory=dict)

    @property
    def by_category(self) -> dict[Category, int]:
        """Memory in use at the peak, by category. Every category appears, so that tables keep their rows."""
        return {c: sum(n for (of, _), n in self.by_both.items() if of == c) for c in CATEGORIES}

    @property
    def by_module(self) -> dict[str, int]:
        """Memory in use at the peak, by module, the largest first."""
        sizes = Counter[str]()
        for (_, module), size in self.by_both.items():
            sizes[module] += size
        return dict(sizes.most_common())

    @property
    def needed_bytes(self) -> int:
        """Most memory that the rank takes from its device."""
        return self.peak_reserved_bytes + self.outside_bytes

    @property
    def fits(self) -> bool:
        """Whether the run goes through and leaves the margin free."""
        return self.runs and not self.num_retries and self.needed_bytes <= self.usable_bytes


def memory_report(trace: Trace, profile: Profile, *, expandable: bool = True) -> MemoryReport:
    """Replay a rank's memory on a device.

    Args:
        trace: the rank's trace.
        profile: the hardware.
        expandable: `training.expandable_segments`.

    Returns:
        The rank's peaks in bytes, and whether they fit.
    """
    workspace = int(profile.workspace_mib * 2**20)
    capacity = int(profile.memory_gib * 2**30)
    # NCCL holds buffers for each communicator that is used, and a group of one rank needs none.
    used = {event.group for event in trace.step if isinstance(event, Transfer)}
    communicators = sum(len(trace.groups[name].ranks) > 1 for name in used)
    outside = int((profile.context_gib + communicators * profile.communicator_gib) * 2**30)
    # First without a limit: this report depends on the trace alone, and most jobs fit.
    report = _unlimited(trace, workspace, expandable)
    report = replace(
        report,
        outside_bytes=outside,
        capacity_bytes=capacity,
        usable_bytes=int(profile.usable_gib * 2**30),
        runs=report.peak_reserved_bytes + outside <= capacity,
    )
    # The peak may hold cached blocks that the allocator would give back, so only a second run with
    # the limit decides.
    if not report.runs:
        events = list(_events(trace, workspace))
        _try_within(report, events, limit_bytes=capacity - outside, expandable=expandable)
    return report


@lru_cache(maxsize=16)  # a sweep asks for one device after the other
def _unlimited(trace: Trace, workspace_bytes: int, expandable: bool) -> MemoryReport:
    """Return the report for a device of unlimited memory."""
    events = list(_events(trace, workspace_bytes))
    allocator = Allocator(expandable=expandable)
    sizes, peak_at = _play(events, allocator)
    # The timeline shows the last step: the last `of_step` events of the list.
    of_step = sum(isinstance(event, (Allocate, Free)) for event in trace.step)
    first = max(0, len(events) - of_step)
    report = MemoryReport(
        rank=trace.rank,
        peak_active_bytes=allocator.peak_active_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        at=_NOWHERE,
        timeline=[],
        by_stream=_named_streams(trace, allocator.reserved_by_stream),
    )
    in_use = dict.fromkeys(CATEGORIES, 0)
    alive: dict[int, Allocate] = {}
    highest, part, total = -1, -1, 0
    phase = "setup"
    for number, event in enumerate(events):
        size = sizes[event.block]
        if isinstance(event, Allocate):
            alive[event.block], phase = event, event.scope.phase
        else:
            event, size = alive.pop(event.block), -size
        in_use[event.category] += size
        total += size
        if number == peak_at:
            report.at = event.scope
            for block, of_block in alive.items():
                report.by_both[of_block.category, of_block.scope.module] += sizes[block]
        # Steps before the last count for what is in use, and make no points.
        if number < first:
            continue
        # Each part keeps only its highest moment, so that a short peak cannot fall between points.
        now = (number - first) * _NUM_POINTS // max(1, len(events) - first)
        if now == part and total <= highest:
            continue
        if now == part:
            report.timeline.pop()
        position = (number - first) / max(1, len(events) - first)
        report.timeline.append(MemoryPoint(number, position, phase, dict(in_use)))
        part, highest = now, total
    return report


def _named_streams(trace: Trace, reserved: Mapping[int, int]) -> dict[str, int]:
    """Return memory by what a stream is for: computation, or the transfers that are issued there most."""
    issued = defaultdict[int, Counter[str]](Counter)
    for event in trace.step:
        if isinstance(event, Transfer):
            issued[event.stream][event.kind] += 1
    found = Counter[str]()
    for stream, size in reserved.items():
        is_known = stream != COMPUTE_STREAM and issued[stream]
        found[issued[stream].most_common(1)[0][0] if is_known else "compute"] += size
    return dict(found)


_MOST_TENSORS = 6  # that are listed for a point


def tensors_behind(
    trace: Trace, profile: Profile, points: Sequence[MemoryPoint]
) -> Iterator[list[tuple[str, int, int]]]:
    """Yield the largest tensors in use at each of these points: description, number of blocks, and their bytes.

    Blocks count together if they have the same category and phase, and the same module in all
    layers.

    Args:
        trace: the rank's trace.
        profile: the hardware.
        points: points of the report's timeline.
    """
    wanted = {point.number for point in points}
    groups = defaultdict[str, Counter[int]](Counter)  # sizes of the blocks in use
    alive: dict[int, tuple[str, int]] = {}
    for number, event in enumerate(_events(trace, int(profile.workspace_mib * 2**20))):
        if isinstance(event, Allocate):
            where = any_layer(event.scope.module) or "no module"
            name = f"{event.category} of {where}, made in {event.scope.phase}"
            alive[event.block] = name, event.size_bytes
            groups[name][event.size_bytes] += 1
        else:
            name, size = alive.pop(event.block)
            groups[name][size] -= 1
        if number in wanted:
            sums = [
                (n, g.total(), sum(k * count for k, count in g.items()))
                for n, g in groups.items()
            ]
            yield nlargest(_MOST_TENSORS, sums, key=lambda entry: entry[2])


def _try_within(
    report: MemoryReport, events: list[Allocate | Free], *, limit_bytes: int, expandable: bool
) -> None:
    """Set the report's fields for a device with a limit, where cached memory may have to be given back."""
    allocator = Allocator(expandable=expandable, limit_bytes=max(0, limit_bytes))
    try:
        _play(events, allocator)
    except OutOfMemory as error:
        scopes = {event.block: event.scope for event in events if isinstance(event, Allocate)}
        scope, gib = scopes[error.key], 2**30
        where = " of ".join(filter(None, (scope.action or scope.phase, scope.module)))
        report.failure = (
            f"out of memory in {where}: {error.size_bytes / gib:.2f} GiB more than the "
            f"{error.reserved_bytes / gib:.2f} GiB that are reserved of {error.limit_bytes / gib:.2f}"
        )
    else:
        report.runs, report.num_retries = True, allocator.num_retries
        report.peak_reserved_bytes = allocator.peak_reserved_bytes
        report.by_stream = {}


def _play(
    events: Iterable[Allocate | Free], allocator: Allocator
) -> tuple[dict[int, int], int]:
    """Pass events through an allocator.

    Return the rounded sizes by block, and the number of the event with the most memory in use.
    """
    sizes: dict[int, int] = {}
    highest, peak_at = -1, 0
    for number, event in enumerate(events):
        if isinstance(event, Free):
            allocator.free(event.block)
            continue
        sizes[event.block] = allocator.allocate(
            event.block, event.size_bytes, stream=event.stream
        )
        if allocator.active_bytes > highest:
            highest, peak_at = allocator.active_bytes, number
    return sizes, peak_at


def _events(trace: Trace, workspace_bytes: int) -> Iterator[Allocate | Free]:
    """Yield all allocations of the construction, of the first step and of later steps.

    Every block has a separate number.
    """
    yield from (e for e in trace.setup if isinstance(e, Allocate | Free))
    # cuBLAS keeps one workspace for each handle and stream from its first matmul to the end of the
    # process.
    if workspace_bytes:
        yield Allocate(
            _WORKSPACE, workspace_bytes, 0, "temporary", Scope("forward", "cuBLAS workspace")
        )
    # Only the memory that the first step leaves counts. The steps below repeat the recorded step.
    freed = {e.block for e in (*trace.first_step, *trace.step) if isinstance(e, Free)}
    lasting = [e for e in trace.first_step if isinstance(e, Allocate) and e.block not in freed]
    # The optimizer's state is made while gradients and other temporary memory of the update exist,
    # which may be the peak. So it waits for the optimizer's phase of the first step.
    yield from (e for e in lasting if e.category != "optimizer")
    yield from _steps(trace, [e for e in lasting if e.category == "optimizer"])


def _steps(trace: Trace, states: list[Allocate]) -> Iterator[Allocate | Free]:
    """Yield three repetitions of the step, with new numbers for its blocks each time.

    The first makes the states, and each later one frees the memory that the one before has left:
    the recorded step may free a block that existed before it. In a repetition, this block stands
    for a block of equal size and module that the previous repetition has left.

    Args:
        trace: the rank's trace.
        states: states that the first step allocates when its optimizer begins.
    """
    before = {e.block: e for e in (*trace.setup, *trace.first_step) if isinstance(e, Allocate)}
    own = {e.block: e for e in trace.step if isinstance(e, Allocate)}
    freed = {e.block for e in trace.step if isinstance(e, Free)}
    # Numbers of the n-th repetition are shifted by n strides, so they never collide.
    stride = max([*before, *own], default=0) + 1
    # Blocks that the previous repetition left, by size and module, oldest first.
    left = defaultdict[tuple[int, str], deque[int]](deque)
    for offset in (stride, 2 * stride, 3 * stride):
        for event in trace.step:
            if states and (scope_of(event) or _NOWHERE).phase == "optimizer":
                yield from states
                states = []
            if isinstance(event, Allocate):
                yield Allocate(
                    event.block + offset,
                    event.size_bytes,
                    event.stream,
                    event.category,
                    event.scope,
                )
            elif isinstance(event, Free) and event.block in own:
                yield Free(event.block + offset)
            elif isinstance(event, Free) and event.block in before:
                # In the first repetition there is none like it, and nothing is freed.
                was = before[event.block]
                if like := left[was.size_bytes, was.scope.module]:
                    yield Free(like.popleft())
        # A step without an optimizer phase still has to make its states.
        yield from states
        states = []
        # Only now may the next repetition free the memory that this one leaves.
        for block, event in own.items():
            if block not in freed:
                left[event.size_bytes, event.scope.module].append(block + offset)
