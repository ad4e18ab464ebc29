"""Traces of many equal blocks from traces of few: what a middle block does, the others do.

A job is traced twice, with k and k + 1 blocks in each pipeline stage. In both, the events are cut into

    sweeps    through all blocks of a stage, upwards (forward, updates) or downwards (backward); a part for each block
    series    of equal events: the norms of n gradients
    others

The two must have the same sweeps, series and others in the same order. In a sweep two neighbouring blocks in the middle must do the same,
to every number and every reference; the one is then repeated. Series, and numbers that differ between the two traces (bytes that the
optimizer moves), grow by their difference with each block. References (an event awaits another, a block of memory is freed) are told
relative to where they stand, so that they hold at any depth. Wherever any of this is not so, `CannotExtrapolate` is raised and
the job has to be traced whole: extension is exact or it is not done. tests/sim/test_extrapolate.py holds the two against each other.
Imports no torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, TypeAlias

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

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
_SECTIONS = ("setup", "first_step", "step")
_FORWARD, _BACKWARD = "forward", ("backward", "recompute")


class CannotExtrapolate(Exception):
    """The traces do not repeat as they would have to; the message says where."""


@dataclass(frozen=True)
class Depth:
    """The blocks of one pipeline stage in the whole model: `count` of them, the first with this number."""

    first: int
    count: int


@dataclass(slots=True)
class _Segment:
    """parts: of a sweep one for each block, in the order in which they come; of a series or another event, one for each event.
    stage: of a sweep, whose blocks these are. direction: the direction of a sweep, else 0. series: equal events."""

    parts: list[list[Event]]
    stage: int = -1
    direction: int = 0
    series: bool = False
    template: int = 0  # of a sweep: the part that is repeated


@dataclass(frozen=True)
class _EventId:
    """Where an event is: segment, part and number within the part."""

    segment: int
    part: int
    number: int


Reference: TypeAlias = tuple[str, int, int, int]
"""How ("block" apart, from the "start", from the "end"), segment, distance, number within the part."""


@dataclass
class _Parsed:
    """A trace in segments. event_ids: of what is referred to, by kind and number; targets: of what refers, by its own event_id."""

    depth: int
    segments: list[_Segment] = field(default_factory=list)
    sections: list[int] = field(default_factory=list)  # segments before each section
    targets: dict[_EventId, _EventId] = field(default_factory=dict)

    def block(self, event_id: _EventId) -> int:
        """Number of the block within its stage, counted from 0; of a series, of the event."""
        segment = self.segments[event_id.segment]
        return event_id.part if segment.direction >= 0 else len(segment.parts) - 1 - event_id.part


def extrapolate(small: Trace, big: Trace, *, depth: int, stages: Sequence[Depth]) -> Trace:
    """The trace of a rank of the whole model, from those with `depth` and `depth` + 1 blocks in every stage.

    stages: of the whole model, all of them, each with at least depth + 1 blocks. Raises CannotExtend.
    """
    few, more = _parse(small, depth), _parse(big, depth + 1)
    if len(few.segments) != len(more.segments) or few.sections != more.sections:
        raise CannotExtrapolate(
            f"{len(few.segments)} parts with {depth} blocks, {len(more.segments)} with one more"
        )
    return _Extension(few, more, stages).trace(big)


# ---- cutting a trace into segments ------------------------------------------------------------------


def _parse(trace: Trace, depth: int) -> _Parsed:
    parsed = _Parsed(depth)
    made: dict[int, Allocate] = {}
    for section in _SECTIONS:
        events: list[Event] = getattr(trace, section)
        for event in events:
            if isinstance(event, Allocate):
                made[event.block] = event
        parsed.sections.append(len(parsed.segments))
        labels = _labels(events, made, depth)
        begin = 0
        while begin < len(events):
            end = begin + 1
            while (
                end < len(events)
                and labels[end] is not None
                and _group(labels, end) == _group(labels, begin)
            ):
                end += 1
            parsed.segments += _segments(events[begin:end], labels[begin:end], made, depth)
            begin = end
    _find_targets(parsed)
    return parsed


def _group(labels: Sequence[Any], index: int) -> Any:
    """What events of one sweep have in common: phase and pipeline action."""
    return labels[index] and labels[index][0]


def _labels(events: Sequence[Event], made: dict[int, Allocate], depth: int) -> list[Any]:
    """((phase, action, stage), block) of each event that belongs to a block, else None.

    Events that have no place are where the ones before them are. What frees memory outside of all blocks belongs to the
    block that took it: gradients and states are given back in the order of their blocks. So do waits for all blocks of a stage.
    """
    labels: list[Any] = []
    here: Any = None
    phase: Any = ("",)
    for event in events:
        scope = getattr(event, "scope", None)
        if scope is not None:
            phase = (_FORWARD if scope.phase not in _BACKWARD else "backward", scope.action)
            layer = _layer(scope)
            here = None if layer is None else ((*phase, layer // depth), layer)
        elif isinstance(event, Free) and here is None:
            layer = _layer(made[event.block].scope)
            labels.append(None if layer is None else ((*phase, "free", layer // depth), layer))
            continue
        labels.append(here)
    _label_waits(events, labels, depth)
    return labels


def _label_waits(events: Sequence[Event], labels: list[Any], depth: int) -> None:
    """Where one stream awaits what all blocks of a stage recorded (FSDP does after a backward pass), each wait is its block's."""
    recorded = {
        event.event: label[1]
        for event, label in zip(events, labels, strict=True)
        if isinstance(event, RecordEvent) and label is not None
    }
    for waits, run in groupby(range(len(events)), lambda n: isinstance(events[n], AwaitEvent)):
        if not waits:
            continue
        awaited = {n: recorded.get(getattr(events[n], "event", -1)) for n in run}
        if len({*awaited.values()} - {None}) >= depth:
            for n, layer in awaited.items():
                labels[n] = None if layer is None else (("wait", layer // depth), layer)


def _layer(scope: Scope) -> int | None:
    return _layer_of(scope.module)


@functools.cache
def _layer_of(module: str) -> int | None:
    match = _LAYER.search(module)
    return int(match[1]) if match else None


@functools.cache
def _any_layer(module: str) -> str:
    return _LAYER.sub("layers.*", module)


def _segments(
    events: Sequence[Event], labels: Sequence[Any], made: dict[int, Allocate], depth: int
) -> Iterator[_Segment]:
    """Neighbouring events of one group: sweeps where they go through all blocks of a stage, and what is left."""
    if labels[0] is None:
        yield _Segment([[events[0]]])
        return
    runs: list[tuple[int, list[Event]]] = []
    for event, (_, layer) in zip(events, labels, strict=True):
        direction = 0 if len(runs) < 2 else runs[-1][0] - runs[-2][0]
        if len(runs) == depth and layer == runs[0][0]:  # and once more from the beginning
            yield from _sweep(runs, depth)
            runs = [(layer, [event])]
        # Something of a block that came before (its prefetch, its end) belongs to the block at hand.
        elif runs and (
            layer == runs[-1][0] or (direction and (layer - runs[-1][0]) * direction < 0)
        ):
            runs[-1][1].append(event)
        else:
            runs.append((layer, [event]))
    yield from _sweep(runs, depth)


def _sweep(runs: Sequence[tuple[int, list[Event]]], depth: int) -> Iterator[_Segment]:
    """One segment, if it is a sweep, or one for each event."""
    stage = runs[0][0] // depth
    layers = [layer - stage * depth for layer, _ in runs]
    if layers in ([*range(depth)], [*reversed(range(depth))]):
        yield _Segment([run for _, run in runs], stage=stage, direction=1 if layers[0] == 0 else -1)
        return
    for _, run in runs:
        for event in run:
            yield _Segment([[event]])


def _alike(event: Allocate | RecordEvent) -> Any:
    """Equal for events that may form a series."""
    if isinstance(event, RecordEvent):
        return event.stream
    return (event.size_bytes, event.stream, event.category, event.scope)


def _join_series(parsed: _Parsed) -> None:
    """Lone equal allocations, or records of events, that follow each other become one segment; and what frees such a series in order."""
    home: dict[
        int, tuple[_Segment, int]
    ] = {}  # of a lone block: its segment, and its place among the parts
    joined: list[_Segment] = []
    starts: list[int] = []
    last: Any = None
    for number, segment in enumerate(parsed.segments):
        if number in parsed.sections:
            starts += [len(joined)] * parsed.sections.count(number)
            last = None
        event, key = segment.parts[0][0], None
        if not segment.direction and isinstance(event, Allocate | RecordEvent):
            key = _alike(event)
            if key != last:
                joined.append(segment)
            else:
                joined[-1].parts.append(segment.parts[0])
                joined[-1].series = True
            if isinstance(event, Allocate):
                home[event.block] = (joined[-1], len(joined[-1].parts) - 1)
        elif not segment.direction and isinstance(event, Free) and event.block in home:
            taken, index = home[event.block]
            key = (id(taken), index)
            # Lists give back their tensors from the end, loops from the beginning.
            if taken.series and last in [
                (id(taken), index - 1, 1),
                (id(taken), index + 1, -1),
                (id(taken), index - 1),
                (id(taken), index + 1),
            ]:
                joined[-1].parts.append(segment.parts[0])
                joined[-1].series = True
                key = (id(taken), index, index - last[1])
            else:
                joined.append(segment)
        else:
            joined.append(segment)
        last = key
    starts += [len(joined)] * (len(parsed.sections) - len(starts))
    parsed.segments, parsed.sections = joined, starts


def _find_targets(parsed: _Parsed) -> None:
    _join_series(parsed)
    blocks: dict[int, _EventId] = {}
    events: dict[int, _EventId] = {}
    works: dict[int, _EventId] = {}
    for event_id, event in _all(parsed.segments):
        if isinstance(event, Allocate):
            blocks[event.block] = event_id
        elif isinstance(event, RecordEvent):
            events[event.event] = event_id
        elif isinstance(event, Transfer):
            if event.work in works:
                parsed.targets[event_id] = works[event.work]
            else:
                works[event.work] = event_id
        elif isinstance(event, Free):
            parsed.targets[event_id] = blocks[event.block]
        elif isinstance(event, AwaitEvent) and event.event in events:
            parsed.targets[event_id] = events[event.event]
        elif isinstance(event, AwaitWork) and event.work in works:
            parsed.targets[event_id] = works[event.work]


def _all(segments: Sequence[_Segment]) -> Iterator[tuple[_EventId, Event]]:
    for u, segment in enumerate(segments):
        for p, part in enumerate(segment.parts):
            for n, event in enumerate(part):
                yield _EventId(u, p, n), event


# ---- putting together a deeper one -----------------------------------------------------------------


class _Extension:
    """Units of two depths, matched, and the trace that follows from them. few and more: with a block less and more."""

    def __init__(self, few: _Parsed, more: _Parsed, stages: Sequence[Depth]) -> None:
        self.few, self.more, self.stages = few, more, stages
        self.used = sorted({segment.stage for segment in more.segments if segment.direction})
        if not self.used:
            raise CannotExtrapolate("no pass through the blocks was found")
        self.num_added = sum(stages[stage].count - more.depth for stage in self.used)
        self.lengths = [self._length(number) for number in range(len(more.segments))]
        self.references = {
            number: self._references(number, segment)
            for number, segment in enumerate(more.segments)
        }
        for number, segment in enumerate(more.segments):
            if segment.direction:
                segment.template = self._find_template(number, segment)

    def _fail(self, number: int, why: str, event_id: _EventId | None = None) -> CannotExtrapolate:
        parts = self.more.segments[number].parts
        return CannotExtrapolate(
            f"{why}: {parts[event_id.part][event_id.number] if event_id else parts[0][0]}"
        )

    def _grown(self, few: int, more: int) -> int:
        """A number that grows with the blocks, at the whole model's depth."""
        added = (more - few) * self.num_added
        if added % len(self.used):
            raise CannotExtrapolate(f"{few} and {more} do not grow evenly with the blocks")
        return more + added // len(self.used)

    def _length(self, number: int) -> int:
        """Parts of a segment in the whole model's trace."""
        few, more = self.few.segments[number], self.more.segments[number]
        if (few.direction, few.stage) != (more.direction, more.stage):
            raise self._fail(number, "one depth passes through the blocks where the other does not")
        if more.direction:
            return self.stages[more.stage].count
        return self._grown(len(few.parts), len(more.parts))

    def _source(self, segment: _Segment, part: int, length: int) -> int:
        """Which part of the deeper trace a part of the whole model's is made from."""
        depth = len(segment.parts)
        if part <= segment.template:
            return part
        return (
            depth - (length - part)
            if length - part < depth - segment.template
            else segment.template
        )

    # ---- references

    def _references(self, number: int, segment: _Segment) -> list[list[Reference | None]]:
        return [
            [self._reference(_EventId(number, p, n)) for n in range(len(part))]
            for p, part in enumerate(segment.parts)
        ]

    def _reference(self, event_id: _EventId) -> Reference | None:
        """What an event refers to, as it holds at both depths."""
        target = self.more.targets.get(event_id)
        if target is None:
            return None
        own, other = self.more.segments[event_id.segment], self.more.segments[target.segment]
        block, last = self.more.block(target), len(other.parts) - 1
        if own.series and other.series:
            if self._is_even(event_id.segment, lambda s, t: t.part - s.part):
                return ("block", target.segment, block - event_id.part, target.number)
            if self._is_even(event_id.segment, lambda s, t: t.part + s.part):
                return ("mirror", target.segment, last - block - event_id.part, target.number)
            raise self._fail(event_id.segment, "frees blocks in an order of its own")
        if last == 0:
            return ("start", target.segment, 0, target.number)
        few = self.few.segments[event_id.segment]
        removed = len(own.parts) - len(few.parts)
        same = _EventId(
            event_id.segment,
            event_id.part if event_id.part < len(own.parts) / 2 else event_id.part - removed,
            event_id.number,
        )
        twin = self.few.targets.get(same)
        if twin is None or twin.segment != target.segment:
            raise self._fail(
                event_id.segment, "refers to different things at different depths", event_id
            )
        was, its_last = self.few.block(twin), len(self.few.segments[twin.segment].parts) - 1
        if own.direction and block - self.more.block(event_id) == was - self.few.block(same):
            return ("block", target.segment, block - self.more.block(event_id), target.number)
        if block == was:
            return ("start", target.segment, block, target.number)
        if last - block == its_last - was:
            return ("end", target.segment, last - block, target.number)
        raise self._fail(
            event_id.segment, "refers to different blocks at different depths", event_id
        )

    def _is_even(self, number: int, relation: Callable[[_EventId, _EventId], int]) -> bool:
        """Whether all parts of a series refer alike."""
        found = set()
        for p in range(len(self.more.segments[number].parts)):
            event_id = _EventId(number, p, 0)
            target = self.more.targets.get(event_id)
            found.add(None if target is None else (target.segment, relation(event_id, target)))
        return len(found) == 1

    def _find_template(self, number: int, segment: _Segment) -> int:
        """A part in the middle that is as the next one is."""
        few, references = self.few.segments[number], self.references[number]
        for one, other in ((few.parts[0], segment.parts[0]), (few.parts[-1], segment.parts[-1])):
            if [*map(_shape, one)] != [*map(_shape, other)]:
                raise self._fail(number, "the first or the last block differs with the depth")
        for t in range(1, len(segment.parts) - 2):
            alike = [*map(_shape, segment.parts[t])] == [*map(_shape, segment.parts[t + 1])]
            if alike and references[t] == references[t + 1]:
                return t
        raise self._fail(number, "neighbouring blocks differ")

    # ---- the trace

    def trace(self, big: Trace) -> Trace:
        self.blocks: dict[_EventId, int] = {}
        self.scopes: dict[tuple[Scope, int], Scope] = {}
        self.kernels: dict[Kernel, Kernel] = {}
        result = Trace(big.rank, big.world_size, groups=big.groups)
        bounds = [*self.more.sections, len(self.more.segments)]
        for section, first, end in zip(_SECTIONS, bounds, bounds[1:], strict=False):
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
                event_id = _EventId(number, part, n)
                # Beyond what was traced of a series, an event refers as its neighbours do.
                reference = self.references[number][source][n]
                target = None if reference is None else self._resolve(reference, event_id)
                grown = event if segment.direction else self._grow(number, source, n, event)
                events.append(self._copy(grown, event_id, target, self._layer(segment, part)))

    def _resolve(self, reference: Reference, event_id: _EventId) -> _EventId:
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
        return _EventId(number, block if segment.direction >= 0 else length - 1 - block, n)

    def _layer(self, segment: _Segment, part: int) -> Callable[[int], int]:
        """Numbers of blocks in the deeper trace to those in the whole model."""
        depth = self.more.depth

        def of_lone_event(layer: int) -> int:
            stage, block = divmod(layer, depth)
            of = self.stages[stage]
            return of.first + (block if block < depth / 2 else of.count - (depth - block))

        if not segment.direction:
            return of_lone_event
        of = self.stages[segment.stage]
        source = self._source(segment, part, of.count)
        is_at = part if segment.direction > 0 else of.count - 1 - part
        was_at = segment.stage * depth + (source if segment.direction > 0 else depth - 1 - source)
        return lambda layer: of.first + is_at + (layer - was_at)

    def _grow(self, number: int, part: int, n: int, event: Event) -> Event:
        few = self.few.segments[number].parts
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
        if more.kind == "optimizer":
            kernel = replace(kernel, num_launches=list_launches(shapes))
        return self.kernels.setdefault(kernel, kernel)

    def _copy(
        self, event: Event, event_id: _EventId, target: _EventId | None, layer: Callable[[int], int]
    ) -> Event:
        """The event with numbers and places of the whole model."""
        of = self.blocks
        # -1: it refers to something from before the trace began
        refers = -1 if target is None else of[target]
        match event:
            case Launch():
                return Launch(event.kernel, event.stream, self._renumbered(event.scope, layer))
            case Allocate():
                of[event_id] = len(of)
                scope = self._renumbered(event.scope, layer)
                return Allocate(of[event_id], event.size_bytes, event.stream, event.category, scope)
            case Free():
                return Free(refers)
            case Transfer():
                if target is None:
                    refers = of[event_id] = len(of)
                return replace(event, work=refers, scope=self._renumbered(event.scope, layer))
            case RecordEvent():
                of[event_id] = len(of)
                return RecordEvent(event.stream, of[event_id])
            case AwaitEvent():
                return AwaitEvent(event.stream, refers)
            case AwaitWork():
                return AwaitWork(event.stream, refers, event.host)
            case _:
                return event

    def _renumbered(self, scope: Scope, layer: Callable[[int], int]) -> Scope:
        found = _layer(scope)
        if found is None:
            return scope
        number = layer(found)
        key = (scope, number)
        if key not in self.scopes:
            module = _LAYER.sub(f"layers.{number}", scope.module, count=1)
            self.scopes[key] = replace(scope, module=module)
        return self.scopes[key]


def _shape(event: Event) -> Any:
    """What neighbouring blocks must have in common: all but references and the number of the block."""
    kind = type(event)
    values: list[Any] = [kind]
    for name in _compared(kind):
        value = getattr(event, name)
        if name == "scope":
            value = (value.phase, _any_layer(value.module), value.action)
        values.append(value)
    return values


@functools.cache
def _compared(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.name not in ("block", "event", "work")]
