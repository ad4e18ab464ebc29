"""Repetition of a model's blocks in a trace: few blocks are recorded, and one in the middle is repeated.

A job is recorded with a few blocks in each pipeline stage, and again with the fewest that it can
have. The events of the first trace are cut into segments (segments.py): layer passes, with a part
for each block; series of equal events; and single events.

    layer pass     two neighbouring parts in the middle must be equal in every number and every reference. The first is repeated
    other events   numbers that differ between the two traces (the optimizer's bytes, the length of a series) grow with the blocks
    reference      (an event awaits another event, a block of memory is freed) has a form that holds for any number of blocks

Example: the model of segments.py's example, recorded with 5 blocks and with 1 block, and wanted with
8 blocks.

    layer pass   parts 0 1 2 3 4 become parts 0 1 1 1 1 2 3 4: part 1 is the template, since part 1 equals part 2
    reference    Free in the backward pass of block 1 refers to the Allocate of block 1, and Free of block 2 to that of block 2.
                 Their distance is 0 in both, so Free of each repeated block refers to the Allocate of the same block
    update       one launch reads 150 bytes with 1 block and 550 with 5: 100 more for each block, 850 with 8

References of the template and its successor decide on the form: equal distances between blocks, or
the same block, counted from the nearer end. A reference of another block has a distance that the
template has, or leads to a block that is counted from the nearer end. If a condition fails,
`CannotRepeat` is raised, and the job is recorded whole: tests/sim/test_extrapolate.py compares the
result with whole traces. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titan.sim.record.segments import (
    LAYER,
    SECTIONS,
    EventId,
    ParsedTrace,
    Segment,
    block_of,
    parse_trace,
    shape_of,
)
from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    Kernel,
    Launch,
    Scope,
    Trace,
    Transfer,
    compared_fields,
    list_launches,
    number_of,
)


class CannotRepeat(Exception):
    """Failure to repeat a part of a trace: the parts differ. The message says where."""


class BlocksDiffer(CannotRepeat):
    """Failure to find two equal blocks. There may be such blocks in a deeper model."""


@dataclass(frozen=True)
class Depth:
    """Blocks of one pipeline stage in the whole model.

    Attributes:
        first: number of the stage's first block.
        count: number of blocks in the stage.
    """

    first: int
    count: int


@dataclass(frozen=True)
class Recorded:
    """Blocks of the recorded models.

    Attributes:
        fewest: blocks of each stage in the trace that shows what grows.
        depth: blocks of each stage in the trace whose blocks are repeated.
        first: blocks at the beginning of the first stage that differ from those after them.
        last: blocks at the end of a stage that differ from those before them.
    """

    fewest: int
    depth: int
    first: int = 0
    last: int = 1


class Reference(NamedTuple):
    """Target of a reference, in a form that holds for any number of blocks.

    Attributes:
        segment: segment of the target.
        number: number of the target within its part.
        from_end: whether `distance` counts from the last block of the segment, not from the first.
        relative: whether the number of the referring event's own block is added, as if a series is
            freed in order or in reverse.
        distance: distance of the target's block. In a series, each event counts as a block.
    """

    segment: int
    number: int
    from_end: bool
    relative: bool
    distance: int


def repeat_blocks(
    few: Trace, more: Trace, recorded: Recorded, stages: Sequence[Depth]
) -> Trace:
    """Return the trace of a rank of the whole model.

    Args:
        few: the rank's trace with `recorded.fewest` blocks in every stage.
        more: its trace with `recorded.depth` blocks.
        recorded: blocks of the two traces.
        stages: all stages of the whole model, each with at least `recorded.depth` blocks.

    Raises:
        CannotRepeat: The traces do not repeat as they must.
    """
    return _Repetition(parse_trace(few, recorded.fewest), more, recorded, stages).trace(more)


class _Repetition:
    """Segments of a trace, and the trace of the whole model that follows from them.

    Attributes:
        more: the trace whose blocks are repeated.
        recorded: blocks of the two traces.
        stages: blocks of each stage in the whole model.
        fewest: for each segment outside of blocks, the same segment with the fewest blocks.
        lengths: number of parts of each segment in the whole model.
        references: references of each segment, by part and event.
    """

    def __init__(
        self, few: ParsedTrace, trace: Trace, recorded: Recorded, stages: Sequence[Depth]
    ) -> None:
        more = parse_trace(trace, recorded.depth)
        self.more, self.recorded, self.stages = more, recorded, stages
        # A rank passes through the stages that it holds. Numbers grow with all their blocks together.
        self.used = sorted({segment.stage for segment in more.segments if segment.direction})
        if not self.used:
            raise CannotRepeat("no pass through the blocks was found")
        _check_alike(trace, self.used, recorded)
        self.num_added = sum(stages[stage].count - more.depth for stage in self.used)
        self.fewest = self._matched(few)
        self.lengths: list[int] = []
        for number in range(len(more.segments)):
            self.lengths.append(self._length(number))
        for number, segment in enumerate(more.segments):
            if segment.direction:
                segment.template = self._find_template(number, segment)
            else:
                segment.template = len(segment.parts) - 1
        self.references = [
            self._references(n, segment) for n, segment in enumerate(more.segments)
        ]

    def _fail(self, number: int, why: str) -> CannotRepeat:
        """Return the error of a segment, with its first event."""
        return CannotRepeat(f"{why}: {next(filter(None, self.more.segments[number].parts))[0]}")

    # ---- what grows with the blocks

    def _matched(self, few: ParsedTrace) -> dict[int, Segment]:
        """Return the segment with the fewest blocks for each segment that may grow."""
        found = [
            [n for n, s in enumerate(p.segments) if _may_grow(s)] for p in (few, self.more)
        ]
        kinds = [
            [(p.segments[n].section, type(p.segments[n].parts[0][0])) for n in numbers]
            for p, numbers in zip((few, self.more), found, strict=True)
        ]
        if kinds[0] != kinds[1]:
            raise CannotRepeat(
                f"{len(kinds[0])} events outside of blocks with {few.depth} blocks, {len(kinds[1])} with {self.more.depth}"
            )
        return {more: few.segments[n] for n, more in zip(*found, strict=True)}

    def _grown(self, few: int, more: int) -> int:
        """Return a number that grows with the blocks, for the whole model."""
        steps = (self.recorded.depth - self.recorded.fewest) * len(self.used)
        added = (more - few) * self.num_added
        if added % steps:
            raise CannotRepeat(f"{few} and {more} do not grow evenly with the blocks")
        return more + added // steps

    def _length(self, number: int) -> int:
        """Return the number of parts that a segment has in the trace of the whole model."""
        segment = self.more.segments[number]
        if segment.direction:
            return self.stages[segment.stage].count
        if number in self.fewest:
            return self._grown(len(self.fewest[number].parts), len(segment.parts))
        target = self.more.targets.get(EventId(number, 0, 0))
        if segment.series and target is not None:  # it frees another series
            other = self.more.segments[target.segment]
            if len(other.parts) == len(segment.parts):
                return self.lengths[target.segment]
            if self.lengths[target.segment] != len(other.parts):
                raise self._fail(number, "frees a part of a series that grows")
        return len(segment.parts)

    def _grow(self, few: Any, more: Any) -> Any:
        """Return an event, kernel or shape of the whole model, from those of the two traces."""
        if few == more:
            return more
        same_kind = type(few) is type(more)
        if same_kind and isinstance(more, int):
            return self._grown(few, more)
        if same_kind and isinstance(more, tuple) and len(few) == len(more):
            return tuple(map(self._grow, few, more))
        if not same_kind or not isinstance(more, Kernel | Event):
            raise CannotRepeat(f"{few} with fewer blocks, {more} with more")
        names = {*compared_fields(type(more))}
        is_list = isinstance(more, Kernel) and more.kind == "optimizer"
        if is_list:  # how its tensors fill launches is not linear
            names.remove("num_launches")
        values = {name: self._grow(getattr(few, name), getattr(more, name)) for name in names}
        if not isinstance(more, Kernel):
            return replace(more, **values)
        if is_list:
            values["num_launches"] = list_launches(values["shapes"])
        kernel = replace(more, **values)
        return self.kernels.setdefault(kernel, kernel)

    # ---- references

    def _find_template(self, number: int, segment: Segment) -> int:
        """Return the part of a layer pass to repeat: it is in the middle, and its successor does the same."""
        shapes = [self._shapes(number, part) for part in range(len(segment.parts))]
        first = self.recorded.first if segment.stage == 0 else 0
        middle = range(first + 1, self.more.depth - self.recorded.last)
        for t in range(len(shapes) - 1):
            blocks = {segment.block(part, len(shapes)) for part in (t, t + 1)}
            if blocks <= {*middle} and shapes[t] == shapes[t + 1]:
                events = range(len(segment.parts[t]))
                if all(self._common(EventId(number, t, n)) is not None for n in events):
                    return t
        event = next(filter(None, segment.parts))[0]
        raise BlocksDiffer(f"neighbouring blocks differ: {event}")

    def _shapes(self, number: int, part: int) -> list[Any]:
        """Return the comparable form of each event of a part, and the segment and number of the event that it refers to."""
        targets = self.more.targets
        # The Free events of a block with experts may equal those of a dense block: only the place of the allocation differs.
        return [
            (
                shape_of(event),
                (target := targets.get(EventId(number, part, n)))
                and (target.segment, target.number),
            )
            for n, event in enumerate(self.more.segments[number].parts[part])
        ]

    def _common(self, event: EventId) -> Reference | bool | None:
        """Return the form of a reference in which an event and the same event of the next part agree.

        True: the event refers to nothing. None: they do not agree.
        """
        targets, following = self.more.targets, event._replace(part=event.part + 1)
        target, other = targets.get(event), targets.get(following)
        if target is None or other is None:
            return True if target is other else None
        if (target.segment, target.number) != (other.segment, other.number):
            return None
        at_end = self._is_near_end(target)
        for from_end, relative in (False, True), (at_end, False), (True, True):
            distances = {
                self.more.distance(a, b, from_end=from_end, relative=relative)
                for a, b in ((event, target), (following, other))
            }
            if len(distances) == 1:
                return Reference(target.segment, target.number, from_end, relative, *distances)
        return None

    def _is_near_end(self, target: EventId) -> bool:
        """Return whether a target is counted from the end of its segment."""
        segment = self.more.segments[target.segment]
        last, block = len(segment.parts) - 1, segment.block(target.part, len(segment.parts))
        if not segment.direction:
            return 2 * block > last
        # Of the template and its neighbour, the lower one.
        lower = segment.block(segment.template + (segment.direction < 0), last + 1)
        return block > lower

    def _references(self, number: int, segment: Segment) -> list[list[Reference | None]]:
        """Return the references of a segment by part and event."""
        count, template = len(segment.parts), segment.template
        # Parts whose references have one form: the template and its successor, or all of a series.
        alike = range(template, template + 2) if segment.direction else range(count)
        events = range(len(segment.parts[alike[0]]))
        common = (
            [self._common(EventId(number, alike[0], n)) for n in events] if count > 1 else []
        )
        forms = [form for form in common if isinstance(form, Reference)]
        near = {(f.segment, f.distance) for f in forms if f.relative and not f.from_end}
        return [
            [
                self._in_form(EventId(number, part, n), common[n])
                if count > 1 and part in alike
                else self._single(EventId(number, part, n), near)
                for n in range(len(events_of_part))
            ]
            for part, events_of_part in enumerate(segment.parts)
        ]

    def _in_form(self, event: EventId, form: Reference | bool | None) -> Reference | None:
        """Return the common form of a reference, which this event's reference must have."""
        target = self.more.targets.get(event)
        if target is None and form is True:
            return None
        if isinstance(form, Reference) and target is not None:
            how = {"from_end": form.from_end, "relative": form.relative}
            is_here = (target.segment, target.number) == (form.segment, form.number)
            if is_here and self.more.distance(event, target, **how) == form.distance:
                return form
        raise self._fail(event.segment, "refers to blocks in no regular order")

    def _single(self, event: EventId, near: set[tuple[int, int]]) -> Reference | None:
        """Return the reference of an event that is not repeated."""
        target = self.more.targets.get(event)
        if target is None:
            return None
        distance = self.more.distance(event, target, from_end=False, relative=True)
        if (target.segment, distance) in near:
            return Reference(target.segment, target.number, False, True, distance)
        at_end = self._is_near_end(target)
        distance = self.more.distance(event, target, from_end=at_end, relative=False)
        return Reference(target.segment, target.number, at_end, False, distance)

    # ---- the trace

    def trace(self, more: Trace) -> Trace:
        """Return the trace of the whole model. `more` gives all but its events."""
        # New number of each event, for events that refer to it.
        self.numbers: dict[EventId, int] = {}
        # Scopes and kernels are shared between events, as in a recorded trace.
        self.scopes: dict[tuple[Scope, int], Scope] = {}
        self.kernels: dict[Kernel, Kernel] = {}
        sections: dict[str, Any] = {name: [] for name in SECTIONS}
        for number, segment in enumerate(self.more.segments):
            self._emit(number, sections[segment.section])
        return replace(more, **sections)

    def _source(self, segment: Segment, part: int, length: int) -> int:
        """Return the recorded part that is copied to a part of the whole model's trace."""
        # Up to the template as recorded, near the end as far from the end as recorded, and the
        # template in between.
        added = length - len(segment.parts)
        return part if part <= segment.template else max(part - added, segment.template)

    def _emit(self, number: int, events: list[Event]) -> None:
        """Append a segment's events to a section of the whole model's trace."""
        segment, length = self.more.segments[number], self.lengths[number]
        for part in range(length):
            source = self._source(segment, part, length)
            layer = self._layer(segment, part)
            for n, event in enumerate(segment.parts[source]):
                event_id = EventId(number, part, n)
                reference = self.references[number][source][n]
                target = None if reference is None else self._resolve(reference, event_id)
                if number in self.fewest:
                    # The shorter series may end earlier. Its last event stands for the rest.
                    few = self.fewest[number].parts
                    event = self._grow(few[min(source, len(few) - 1)][n], event)
                events.append(self._copy(event, event_id, target, layer))

    def _resolve(self, reference: Reference, event_id: EventId) -> EventId:
        """Return the event of the whole model that a reference leads to."""
        # The inverse of `ParsedTrace.distance`, with the lengths of the whole model.
        own, segment = (
            self.more.segments[event_id.segment],
            self.more.segments[reference.segment],
        )
        length, block = self.lengths[reference.segment], reference.distance
        if reference.relative:
            block += own.block(event_id.part, self.lengths[event_id.segment])
        if reference.from_end:
            block = length - 1 - block
        return EventId(reference.segment, segment.block(block, length), reference.number)

    def _layer(self, segment: Segment, part: int) -> Callable[[int], int]:
        """Return a function from a block's number in the recorded trace to its number in the whole model."""
        depth = self.more.depth

        def of_single_event(layer: int) -> int:
            number, block = divmod(layer, depth)
            stage = self.stages[number]
            # Blocks near the end of a stage keep their distance from the end.
            return stage.first + (block if block < depth / 2 else stage.count - (depth - block))

        if not segment.direction:
            return of_single_event
        stage = self.stages[segment.stage]
        source = self._source(segment, part, stage.count)
        is_at = segment.block(part, stage.count)
        was_at = segment.stage * depth + segment.block(source, depth)
        # A part may name other blocks, such as the next one, whose parameters it gathers.
        return lambda layer: stage.first + is_at + (layer - was_at)

    def _copy(
        self,
        event: Event,
        event_id: EventId,
        target: EventId | None,
        layer: Callable[[int], int],
    ) -> Event:
        """Return the event with the numbers and scopes of the whole model."""
        changes: dict[str, Any] = {}
        if (key := number_of(event)) is not None:
            # Events that others refer to get a number; for a work this is its first transfer. Numbers of blocks, events and works
            # come from one counter: the new trace needs them only to be distinct. -1: it refers to something from before the trace began.
            if target is None and isinstance(event, BEGINS):
                target = event_id
                self.numbers[event_id] = len(self.numbers)
            if target is not None and target not in self.numbers:
                raise CannotRepeat(f"refers to an event that does not come before it: {event}")
            changes[key[0]] = -1 if target is None else self.numbers[target]
        if isinstance(event, Launch | Allocate | Transfer):
            changes["scope"] = self._renumbered(event.scope, layer)
        return replace(event, **changes) if changes else event

    def _renumbered(self, scope: Scope, layer: Callable[[int], int]) -> Scope:
        """Return a scope with its block's number in the whole model."""
        recorded = block_of(scope)
        # An event outside all blocks keeps its scope.
        if recorded is None:
            return scope
        number = layer(recorded)
        key = (scope, number)
        if key not in self.scopes:
            module = LAYER.sub(f"layers.{number}", scope.module, count=1)
            self.scopes[key] = replace(scope, module=module)
        return self.scopes[key]


def _check_alike(trace: Trace, stages: Sequence[int], recorded: Recorded) -> None:
    """Check that all blocks that should be alike multiply the same matrices, also the last one."""
    launched: dict[int | None, list[Any]] = {}
    for event in trace.step:
        if isinstance(event, Launch) and event.kernel.flops and event.scope.phase == "forward":
            launched.setdefault(block_of(event.scope), []).append(shape_of(event)[1:])
    for stage in stages:
        first = stage * recorded.depth + (recorded.first if stage == 0 else 0) + 1
        blocks = range(first, (stage + 1) * recorded.depth)
        if any(launched.get(block) != launched.get(first) for block in blocks):
            raise CannotRepeat("blocks compute different things")


def _may_grow(segment: Segment) -> bool:
    """Return whether a segment's numbers, or its length, may grow with the blocks."""
    is_reference = any(
        isinstance(e, Free | AwaitEvent | AwaitWork) for e in segment.parts[0][:1]
    )
    return not (segment.direction or segment.of_block or is_reference)
