"""Extrapolate traces of few equal blocks to many: what a middle block does, the others do.

A job is traced twice, with k and k + 1 blocks in each pipeline stage. In both traces the events are cut into segments:

    layer passes   through all blocks of a stage, upwards (forward, updates) or downwards (backward). One part for each block
    series         of equal events, such as the norms of n gradients. One part for each event
    others         one event each

Both traces must have the same segments in the same order. In a layer pass, two neighbouring blocks in the middle must do
the same, to every number and every reference. One of the two is then repeated. The length of a series, and numbers that
differ between the two traces (bytes that the optimizer moves), grow by their difference with each block. A reference (an
event awaits another, a block of memory is freed) is stored relative to its own position, so that it holds at any depth.

If any of this fails, `CannotExtrapolate` is raised, and the job is traced whole. The result is exact, or there is none:
tests/sim/test_extrapolate.py compares it with whole traces. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from .segments import (
    LAYER,
    SECTIONS,
    EventId,
    ParsedTrace,
    Segment,
    any_layer,
    block_of,
    parse_trace,
)
from .trace import (
    Allocate,
    AwaitEvent,
    AwaitWork,
    Event,
    Free,
    Kernel,
    Launch,
    RecordEvent,
    Scope,
    Trace,
    Transfer,
    list_launches,
)


class CannotExtrapolate(Exception):
    """Report that the traces do not repeat as they must. The message says where."""


@dataclass(frozen=True)
class Depth:
    """Describe the blocks of one pipeline stage in the whole model: how many, and the number of the
    first one."""

    first: int
    count: int


Reference: TypeAlias = tuple[str, int, int, int]
"""What an event refers to: how its part is found, its segment, a distance, and its number within the part. How:

    "block"    the distance in blocks, from the block of the event that refers
    "start"    that block, counted from the first
    "end"      that block, counted from the last
    "mirror"   in a series that frees another one in reverse: the distance from the mirrored part
"""


def extrapolate(small: Trace, big: Trace, *, depth: int, stages: Sequence[Depth]) -> Trace:
    """Return the trace of a rank of the whole model. Raises CannotExtrapolate.

    Args:
        small: the rank's trace with `depth` blocks in every stage.
        big: its trace with `depth` + 1 blocks.
        depth: blocks of the smaller model's stages.
        stages: all stages of the whole model, each with at least `depth` + 1 blocks.
    """
    few, more = parse_trace(small, depth), parse_trace(big, depth + 1)
    if len(few.segments) != len(more.segments) or few.sections != more.sections:
        raise CannotExtrapolate(
            f"{len(few.segments)} parts with {depth} blocks, {len(more.segments)} with one more"
        )
    # With equal numbers of segments, the n-th of one depth is the n-th of the other.
    return _Extrapolation(few, more, stages).trace(big)


# ---- putting together a deeper one -----------------------------------------------------------------


class _Extrapolation:
    """Match the segments of two depths, and make the trace that follows from them. few, more: the depths."""

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
        # Only layer passes have a template. A series repeats its last event.
        for number, segment in enumerate(more.segments):
            if segment.direction:
                segment.template = self._find_template(number, segment)

    def _fail(self, number: int, why: str, event_id: EventId | None = None) -> CannotExtrapolate:
        parts = self.more.segments[number].parts
        event = parts[event_id.part][event_id.number] if event_id else next(filter(None, parts))[0]
        return CannotExtrapolate(f"{why}: {event}")

    def _grown(self, few: int, more: int) -> int:
        """Extrapolate a number that grows with the blocks to the whole model's depth."""
        # One more block in every stage made the difference, so each added block makes its share of
        # it.
        added = (more - few) * self.num_added
        if added % len(self.used):
            raise CannotExtrapolate(f"{few} and {more} do not grow evenly with the blocks")
        return more + added // len(self.used)

    def _length(self, number: int) -> int:
        """Return how many parts a segment has in the whole model's trace."""
        few, more = self.few.segments[number], self.more.segments[number]
        if (few.direction, few.stage) != (more.direction, more.stage):
            raise self._fail(number, "one depth passes through the blocks where the other does not")
        if more.direction:
            return self.stages[more.stage].count
        return self._grown(len(few.parts), len(more.parts))

    def _source(self, segment: Segment, part: int, length: int) -> int:
        """Return the part of the deeper trace from which a part of the whole model's is made."""
        depth = len(segment.parts)
        # Up to the template as traced, near the end as far from the end as traced, and the template
        # in between.
        if part <= segment.template:
            return part
        to_end = length - part
        return depth - to_end if to_end < depth - segment.template else segment.template

    # ---- references

    def _references(self, number: int, segment: Segment) -> list[list[Reference | None]]:
        return [
            [self._reference(EventId(number, p, n)) for n in range(len(part))]
            for p, part in enumerate(segment.parts)
        ]

    def _reference(self, event_id: EventId) -> Reference | None:
        """Return what an event refers to, in a form that holds at both depths. None: nothing."""
        target = self.more.targets.get(event_id)
        if target is None:
            return None
        own, other = self.more.segments[event_id.segment], self.more.segments[target.segment]
        block, last = self.more.block(target), len(other.parts) - 1
        # Both are series: gradients that are freed as a list, in the order of their allocation or
        # against it.
        if own.series and other.series:
            if self._is_even(event_id.segment, lambda s, t: t.part - s.part):
                return ("block", target.segment, block - event_id.part, target.number)
            if self._is_even(event_id.segment, lambda s, t: t.part + s.part):
                return ("mirror", target.segment, last - block - event_id.part, target.number)
            raise self._fail(event_id.segment, "frees blocks in no regular order")
        # A single event has no distance to keep.
        if last == 0:
            return ("start", target.segment, 0, target.number)
        # The same event in the shallower trace: parts near the end keep their distance from the end.
        few = self.few.segments[event_id.segment]
        removed = len(own.parts) - len(few.parts)
        same = EventId(
            event_id.segment,
            event_id.part if event_id.part < len(own.parts) / 2 else event_id.part - removed,
            event_id.number,
        )
        # What the same event refers to in the shallower trace decides how the distance is stored.
        twin = self.few.targets.get(same)
        if twin is None or twin.segment != target.segment:
            raise self._fail(
                event_id.segment, "refers to different things at different depths", event_id
            )
        was, its_last = self.few.block(twin), len(self.few.segments[twin.segment].parts) - 1
        # Of the ways to say where the target is, take one that says the same at both depths.
        if own.direction and block - self.more.block(event_id) == was - self.few.block(same):
            return ("block", target.segment, block - self.more.block(event_id), target.number)
        if block == was:
            return ("start", target.segment, block, target.number)
        if last - block == its_last - was:
            return ("end", target.segment, last - block, target.number)
        raise self._fail(
            event_id.segment, "refers to different blocks at different depths", event_id
        )

    def _is_even(self, number: int, relation: Callable[[EventId, EventId], int]) -> bool:
        """Return whether all parts of a series refer to the same segment, in the same relation."""
        # One event in each part, so its number is 0.
        relations = set()
        for p in range(len(self.more.segments[number].parts)):
            event_id = EventId(number, p, 0)
            target = self.more.targets.get(event_id)
            relations.add(None if target is None else (target.segment, relation(event_id, target)))
        return len(relations) == 1

    def _find_template(self, number: int, segment: Segment) -> int:
        """Return a part in the middle that equals the next one, and that the shallower trace has one less of."""
        references = self.references[number]
        few, more = ([*map(_shapes, s.parts)] for s in (self.few.segments[number], segment))
        # The ends must not depend on the depth, or they would not hold at the whole model's.
        if few[0] != more[0] or few[-1] != more[-1]:
            raise self._fail(number, "the first or the last block differs with the depth")
        # From the second block to the one before the last, as `t + 1` must be in the middle too. Dense blocks before those
        # with experts may equal each other, but a deeper model has no more of them.
        for t in range(1, len(more) - 2):
            alike = more[t] == more[t + 1] and references[t] == references[t + 1]
            if alike and few == more[:t] + more[t + 1 :]:
                return t
        raise self._fail(number, "neighbouring blocks differ")

    # ---- the trace

    def trace(self, big: Trace) -> Trace:
        # By event of the new trace: its new number, for those that refer to it.
        self.numbers: dict[EventId, int] = {}
        # Scopes and kernels are shared between events, as in a recorded trace.
        self.scopes: dict[tuple[Scope, int], Scope] = {}
        self.kernels: dict[Kernel, Kernel] = {}
        result = Trace(big.rank, big.world_size, groups=big.groups)
        # Where each section's segments begin, and where the last one ends.
        bounds = [*self.more.sections, len(self.more.segments)]
        for section, first, end in zip(SECTIONS, bounds, bounds[1:], strict=False):
            events: list[Event] = []
            for number in range(first, end):
                self._emit(number, events)
            setattr(result, section, events)
        return result

    def _emit(self, number: int, events: list[Event]) -> None:
        segment, length = self.more.segments[number], self.lengths[number]
        for part in range(length):
            source = (
                self._source(segment, part, length)
                if segment.direction
                else min(part, len(segment.parts) - 1)
            )
            for n, event in enumerate(segment.parts[source]):
                event_id = EventId(number, part, n)
                # An event of a series beyond those traced refers as the last one of them does.
                reference = self.references[number][source][n]
                target = None if reference is None else self._resolve(reference, event_id)
                grown = event if segment.direction else self._grow(number, source, n, event)
                # Only what belongs to no layer pass grows: within a pass, sizes belong to a block.
                events.append(self._copy(grown, event_id, target, self._layer(segment, part)))

    def _resolve(self, reference: Reference, event_id: EventId) -> EventId:
        # The inverse of `_reference`, with the lengths of the whole model.
        kind, number, distance, n = reference
        segment, length = self.more.segments[number], self.lengths[number]
        if kind == "start":
            block = distance
        elif kind == "end":
            block = length - 1 - distance
        elif kind == "mirror":
            block = length - 1 - distance - event_id.part
        else:
            own = self.more.segments[event_id.segment]
            block = distance + (
                event_id.part
                if own.direction >= 0
                else self.lengths[event_id.segment] - 1 - event_id.part
            )
        # In a downward pass the first part is the last block.
        return EventId(number, block if segment.direction >= 0 else length - 1 - block, n)

    def _layer(self, segment: Segment, part: int) -> Callable[[int], int]:
        """Return the map from a block's number in the deeper trace to that in the whole model."""
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
        is_at = part if segment.direction > 0 else stage.count - 1 - part
        was_at = segment.stage * depth + (source if segment.direction > 0 else depth - 1 - source)
        # A part may name other blocks, such as the next one, whose parameters it gathers.
        return lambda layer: stage.first + is_at + (layer - was_at)

    def _grow(self, number: int, part: int, n: int, event: Event) -> Event:
        # An event outside the passes may handle all blocks at once, such as one update of every
        # parameter.
        few = self.few.segments[number].parts
        # The shallower trace may have a shorter series, whose last event stands for the rest.
        twin = few[min(part, len(few) - 1)][n]
        if type(twin) is not type(event):
            raise self._fail(number, "depths differ")
        if isinstance(event, Launch) and isinstance(twin, Launch):
            return replace(event, kernel=self._grow_kernel(twin.kernel, event.kernel))
        if isinstance(event, (Allocate, Transfer)) and isinstance(twin, (Allocate, Transfer)):
            return replace(event, size_bytes=self._grown(twin.size_bytes, event.size_bytes))
        return event

    def _grow_kernel(self, few: Kernel, more: Kernel) -> Kernel:
        if few == more:
            return more
        if few.name != more.name or [*map(len, few.shapes)] != [*map(len, more.shapes)]:
            raise CannotExtrapolate(f"{few.name} where the deeper trace has {more.name}")
        shapes = tuple(
            tuple(self._grown(x, y) for x, y in zip(a, b, strict=True))
            for a, b in zip(few.shapes, more.shapes, strict=True)
        )
        kernel = replace(
            more,
            shapes=shapes,
            **{
                name: self._grown(getattr(few, name), getattr(more, name))
                for name in ("flops", "read_bytes", "write_bytes")
            },
        )
        # One update of many tensors takes more launches for more of them.
        if more.kind == "optimizer":
            kernel = replace(kernel, num_launches=list_launches(shapes))
        return self.kernels.setdefault(kernel, kernel)

    def _copy(
        self, event: Event, event_id: EventId, target: EventId | None, layer: Callable[[int], int]
    ) -> Event:
        """Return the event with the numbers and scopes of the whole model."""
        # Numbers of blocks, events and works come from one counter: the new trace needs them only
        # to be distinct.
        numbers = self.numbers
        # -1: it refers to something from before the trace began.
        refers = -1 if target is None else numbers[target]
        match event:
            case Launch():
                return Launch(event.kernel, event.stream, self._renumbered(event.scope, layer))
            case Allocate():
                numbers[event_id] = len(numbers)
                scope = self._renumbered(event.scope, layer)
                return Allocate(
                    numbers[event_id], event.size_bytes, event.stream, event.category, scope
                )
            case Free():
                return Free(refers)
            case Transfer():
                if target is None:  # the first of its work, which has a new number
                    refers = numbers[event_id] = len(numbers)
                return replace(event, work=refers, scope=self._renumbered(event.scope, layer))
            case RecordEvent():
                numbers[event_id] = len(numbers)
                return RecordEvent(event.stream, numbers[event_id])
            case AwaitEvent():
                return AwaitEvent(event.stream, refers)
            case AwaitWork():
                return AwaitWork(event.stream, refers, event.host)
            case _:
                return event

    def _renumbered(self, scope: Scope, layer: Callable[[int], int]) -> Scope:
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


def _shapes(part: Sequence[Event]) -> list[Any]:
    return [_shape(event) for event in part]


def _shape(event: Event) -> Any:
    """Return what neighbouring blocks must have in common: all but references and the number of the block."""
    kind = type(event)
    values: list[Any] = [kind]
    for name in _compared(kind):
        value = getattr(event, name)
        if name == "scope":
            value = (value.phase, any_layer(value.module), value.action, value.call)
        values.append(value)
    return values


@functools.cache
def _compared(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.name not in ("block", "event", "work")]
