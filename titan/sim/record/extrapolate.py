"""Extrapolation of a trace from few equal blocks to many: all middle blocks do the same.

A job is traced twice, with k and k + 1 blocks in each pipeline stage. The events of both traces are
cut into segments:

    layer passes   through all blocks of a stage, upwards (forward, updates) or downwards (backward). One part for each block
    series         of equal events, such as the norms of n gradients. One part for each event
    others         one event each

Both traces must have the same segments in the same order. In a layer pass, two neighbouring blocks
in the middle must be equal in every number and every reference. One of the two is then repeated.
The length of a series, and numbers that differ between the two traces (bytes that the optimizer
moves), grow by their difference with each block. A reference (an event awaits another event, a
block of memory is freed) is stored relative to its own position, so that it holds at any depth.

Example: the model of segments.py's example, traced with k = 3 and with 4 blocks, and wanted with 6
blocks.

    layer pass   parts 0 1 2 3 of the deeper trace become parts 0 1 1 1 2 3: part 1 is the template, since part 1 equals part 2
    reference    Free of block n refers to the Allocate of block n: relative distance 0 in both traces, so 0 for all 6 blocks
    update       one launch reads 350 bytes with 3 blocks and 450 with 4: 100 more for each block, 650 with 6

If any of these conditions fails, `CannotExtrapolate` is raised, and the job is traced whole. The
result is exact, or there is none: tests/sim/test_extrapolate.py compares it with whole traces.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titan.sim.record.segments import (
    LAYER,
    EventId,
    ParsedTrace,
    Segment,
    any_layer,
    block_of,
    parse_trace,
)
from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    Event,
    Kernel,
    Launch,
    Scope,
    Trace,
    Transfer,
    compared_fields,
    list_launches,
    number_of,
)


class CannotExtrapolate(Exception):
    """Failure to extrapolate: the traces do not repeat as they must. The message says where."""


@dataclass(frozen=True)
class Depth:
    """Blocks of one pipeline stage in the whole model.

    Attributes:
        first: Number of the stage's first block.
        count: Number of blocks in the stage.
    """

    first: int
    count: int


class Reference(NamedTuple):
    """Target of a reference, in a form that holds at any depth.

    Attributes:
        segment: Segment of the target.
        number: Number of the target within its part.
        from_end: Whether `distance` counts from the last block of the segment, not from the first.
        relative: Whether the number of the referring event's own block is added, as if a series is
            freed in order or in reverse.
        distance: Distance of the target's block. In a series, each event counts as a block.
    """

    segment: int
    number: int
    from_end: bool
    relative: bool
    distance: int


# Forms of a reference as (from_end, relative), in the order in which they are tried.
_IN_PASS = ((False, True), (False, False), (True, False), (True, True))
_IN_SERIES = ((False, True), (True, True))


def extrapolate(small: Trace, big: Trace, *, depth: int, stages: Sequence[Depth]) -> Trace:
    """Return the trace of a rank of the whole model.

    Args:
        small: The rank's trace with `depth` blocks in every stage.
        big: Its trace with `depth` + 1 blocks.
        depth: Blocks in each stage of the smaller model.
        stages: All stages of the whole model, each with at least `depth` + 1 blocks.

    Raises:
        CannotExtrapolate: The traces do not repeat as they must.
    """
    few, more = parse_trace(small, depth), parse_trace(big, depth + 1)
    if [s.section for s in few.segments] != [s.section for s in more.segments]:
        raise CannotExtrapolate(
            f"{len(few.segments)} parts with {depth} blocks, {len(more.segments)} with one more"
        )
    # With equal numbers of segments, the n-th of one depth is the n-th of the other.
    return _Extrapolation(few, more, stages).trace(big)


# ---- the trace of a deeper model -------------------------------------------------------------------


class _Extrapolation:
    """Matched segments of two depths, and the trace of a deeper model that follows from them.

    Attributes:
        few: The shallower trace.
        more: The deeper trace, with one more block in every stage.
        stages: Blocks of each stage in the whole model.
    """

    def __init__(self, few: ParsedTrace, more: ParsedTrace, stages: Sequence[Depth]) -> None:
        self.few, self.more, self.stages = few, more, stages
        # A rank passes through the stages that it holds. Numbers grow with all their blocks together.
        self.used = sorted({segment.stage for segment in more.segments if segment.direction})
        if not self.used:
            raise CannotExtrapolate("no pass through the blocks was found")
        # Blocks of this rank that the deeper trace lacks, over all its stages.
        self.num_added = sum(stages[stage].count - more.depth for stage in self.used)
        self.lengths = [self._length(number) for number in range(len(more.segments))]
        self.references = {
            number: self._references(number, segment)
            for number, segment in enumerate(more.segments)
        }
        for number, segment in enumerate(more.segments):
            segment.template = self._find_template(number, segment)

    def _fail(self, number: int, why: str, event_id: EventId | None = None) -> CannotExtrapolate:
        """Return the error of a segment, with one of its events."""
        parts = self.more.segments[number].parts
        event = parts[event_id.part][event_id.number] if event_id else next(filter(None, parts))[0]
        return CannotExtrapolate(f"{why}: {event}")

    def _grown(self, few: int, more: int) -> int:
        """Extrapolate a number that grows with the blocks to the depth of the whole model."""
        # One more block in every stage made the difference, so each added block makes its share of
        # it.
        added = (more - few) * self.num_added
        if added % len(self.used):
            raise CannotExtrapolate(f"{few} and {more} do not grow evenly with the blocks")
        return more + added // len(self.used)

    def _length(self, number: int) -> int:
        """Return the number of parts that a segment has in the trace of the whole model."""
        few, more = self.few.segments[number], self.more.segments[number]
        if (few.direction, few.stage) != (more.direction, more.stage):
            raise self._fail(number, "one depth passes through the blocks where the other does not")
        if more.direction:
            return self.stages[more.stage].count
        return self._grown(len(few.parts), len(more.parts))

    def _source(self, segment: Segment, part: int, length: int) -> int:
        """Return the part of the deeper trace that is copied to a part of the whole model's trace."""
        depth = len(segment.parts)
        # Up to the template as traced, near the end as far from the end as traced, and the template
        # in between.
        if part <= segment.template:
            return part
        to_end = length - part
        return depth - to_end if to_end < depth - segment.template else segment.template

    # ---- references

    def _references(self, number: int, segment: Segment) -> list[list[Reference | None]]:
        """Return the references of a segment by part and event."""
        return [
            [self._reference(EventId(number, p, n)) for n in range(len(part))]
            for p, part in enumerate(segment.parts)
        ]

    def _reference(self, event_id: EventId) -> Reference | None:
        """Return the reference of an event in a form that holds at both depths, or None if the event refers to nothing."""
        target = self.more.targets.get(event_id)
        if target is None:
            return None
        own, few = self.more.segments[event_id.segment], self.few.segments[event_id.segment]
        # The same event in the shallower trace: parts near the end keep their distance from the end.
        removed = len(own.parts) - len(few.parts)
        near_end = event_id.part >= len(own.parts) / 2
        same = event_id._replace(part=event_id.part - removed * near_end)
        twin = self.few.targets.get(same)
        if twin is None or twin.segment != target.segment:
            raise self._fail(
                event_id.segment, "refers to different things at different depths", event_id
            )
        for from_end, relative in _IN_SERIES if own.series else _IN_PASS:
            distances = {
                parsed.distance(a, b, from_end=from_end, relative=relative)
                for parsed, a, b in ((self.more, event_id, target), (self.few, same, twin))
            }
            if len(distances) == 1:
                return Reference(target.segment, target.number, from_end, relative, *distances)
        raise self._fail(
            event_id.segment, "refers to different blocks at different depths", event_id
        )

    def _find_template(self, number: int, segment: Segment) -> int:
        """Return the part to repeat.

        This is the last part of a series. In a layer pass, it is a middle part that equals its
        successor, and without which the deeper trace's pass equals the shallower trace's.
        """
        references = self.references[number]
        if not segment.direction:
            if any(part != references[0] for part in references):
                raise self._fail(number, "refers to blocks in no regular order")
            return len(references) - 1
        few, more = (
            [_shapes(parsed, number, part) for part in range(len(parsed.segments[number].parts))]
            for parsed in (self.few, self.more)
        )
        # The ends must not depend on the depth, or they would not hold at the whole model's.
        if few[0] != more[0] or few[-1] != more[-1]:
            raise self._fail(number, "the first or the last block differs with the depth")
        # `t` and `t + 1` are both in the middle. Dense blocks that precede the blocks with experts may equal each other, but
        # a deeper model has no more of them.
        for t in range(1, len(more) - 2):
            alike = more[t] == more[t + 1] and references[t] == references[t + 1]
            if alike and few == more[:t] + more[t + 1 :]:
                return t
        raise self._fail(number, "neighbouring blocks differ")

    # ---- the trace

    def trace(self, big: Trace) -> Trace:
        """Return the trace of the whole model. `big` gives its groups."""
        # New number of each event, for events that refer to it.
        self.numbers: dict[EventId, int] = {}
        # Scopes and kernels are shared between events, as in a recorded trace.
        self.scopes: dict[tuple[Scope, int], Scope] = {}
        self.kernels: dict[Kernel, Kernel] = {}
        result = Trace(big.rank, big.world_size, groups=big.groups)
        for number, segment in enumerate(self.more.segments):
            self._emit(number, getattr(result, segment.section))
        return result

    def _emit(self, number: int, events: list[Event]) -> None:
        """Append a segment's events to a section of the whole model's trace."""
        segment, length = self.more.segments[number], self.lengths[number]
        for part in range(length):
            source = self._source(segment, part, length)
            for n, event in enumerate(segment.parts[source]):
                event_id = EventId(number, part, n)
                # An event beyond the traced length of a series has the reference of the last traced event.
                reference = self.references[number][source][n]
                target = None if reference is None else self._resolve(reference, event_id)
                # Only events outside layer passes grow: within a pass, sizes belong to a block.
                if not segment.direction:
                    # The shallower trace may have a shorter series, whose last event stands for the rest.
                    few = self.few.segments[number].parts
                    event = self._grow(few[min(source, len(few) - 1)][n], event)
                events.append(self._copy(event, event_id, target, self._layer(segment, part)))

    def _resolve(self, reference: Reference, event_id: EventId) -> EventId:
        """Return the event of the whole model that a reference leads to."""
        # The inverse of `ParsedTrace.distance`, with the lengths of the whole model.
        own, segment = self.more.segments[event_id.segment], self.more.segments[reference.segment]
        length, block = self.lengths[reference.segment], reference.distance
        if reference.relative:
            block += own.block(event_id.part, self.lengths[event_id.segment])
        if reference.from_end:
            block = length - 1 - block
        return EventId(reference.segment, segment.block(block, length), reference.number)

    def _layer(self, segment: Segment, part: int) -> Callable[[int], int]:
        """Return a function from a block's number in the deeper trace to its number in the whole model."""
        depth = self.more.depth

        def of_single_event(layer: int) -> int:
            number, block = divmod(layer, depth)
            # A single event names a block by its number in the deeper model, where every stage has
            # `depth` of them.
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

    def _grow(self, few: Any, more: Any) -> Any:
        """Extrapolate the numbers in which events, kernels or shapes of the two depths differ."""
        if few == more:
            return more
        same_kind = type(few) is type(more)
        if same_kind and isinstance(more, int):
            return self._grown(few, more)
        if same_kind and isinstance(more, tuple) and len(few) == len(more):
            return tuple(map(self._grow, few, more))
        if not same_kind or not isinstance(more, Kernel | Event):
            raise CannotExtrapolate(f"{few} where the deeper trace has {more}")
        values = {
            name: self._grow(getattr(few, name), getattr(more, name))
            for name in compared_fields(type(more))
        }
        if not isinstance(more, Kernel):
            return replace(more, **values)
        # One update of many tensors takes more launches for more of them.
        if more.kind == "optimizer":
            values["num_launches"] = list_launches(values["shapes"])
        kernel = replace(more, **values)
        return self.kernels.setdefault(kernel, kernel)

    def _copy(
        self, event: Event, event_id: EventId, target: EventId | None, layer: Callable[[int], int]
    ) -> Event:
        """Return the event with the numbers and scopes of the whole model."""
        changes: dict[str, Any] = {}
        if (key := number_of(event)) is not None:
            # Events that others refer to get a number; for a work this is its first transfer. Numbers of blocks, events and works
            # come from one counter: the new trace needs them only to be distinct. -1: it refers to something from before the trace began.
            if target is None and isinstance(event, BEGINS):
                target = event_id
                self.numbers[event_id] = len(self.numbers)
            changes[key[0]] = -1 if target is None else self.numbers[target]
        if isinstance(event, Launch | Allocate | Transfer):
            changes["scope"] = self._renumbered(event.scope, layer)
        return replace(event, **changes) if changes else event

    def _renumbered(self, scope: Scope, layer: Callable[[int], int]) -> Scope:
        """Return a scope with its block's number in the whole model."""
        traced = block_of(scope)
        # An event outside all blocks keeps its scope.
        if traced is None:
            return scope
        number = layer(traced)
        key = (scope, number)
        if key not in self.scopes:
            module = LAYER.sub(f"layers.{number}", scope.module, count=1)
            self.scopes[key] = replace(scope, module=module)
        return self.scopes[key]


def _shapes(parsed: ParsedTrace, number: int, part: int) -> list[Any]:
    """Return the comparable form of each event of a part, and the segment and number of the event that it refers to."""
    targets = parsed.targets
    # The Free events of a block with experts may equal those of a dense block: only the place of the allocation differs.
    return [
        (
            _shape(event),
            (target := targets.get(EventId(number, part, n))) and (target.segment, target.number),
        )
        for n, event in enumerate(parsed.segments[number].parts[part])
    ]


def _shape(event: Event) -> Any:
    """Return the fields that equal events have in common: all but references and the block's number."""
    kind, scope = type(event), getattr(event, "scope", None)
    where = scope and (scope.phase, any_layer(scope.module), scope.action, scope.call)
    return [kind, where, *(getattr(event, name) for name in compared_fields(kind))]
