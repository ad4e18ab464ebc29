"""Traces of many equal blocks from traces of few: what a middle block does, the others do.

A job is traced twice, with k and k + 1 blocks in each pipeline stage. In both, the events are cut into

    sweeps    through all blocks of a stage, upwards (forward, updates) or downwards (backward); a part for each block
    series    of equal events: the norms of n gradients
    others

The two must have the same sweeps, series and others in the same order. In a sweep two neighbouring blocks in the middle must do the same,
to every number and every reference; the one is then repeated. Series, and numbers that differ between the two traces (bytes that the
optimizer moves), grow by their difference with each block. References (an event awaits another, a block of memory is freed) are told
relative to where they stand, so that they hold at any depth. Wherever any of this is not so, `CannotExtend` is raised and
the job has to be traced whole: extension is exact or it is not done. tests/sim/test_extend.py holds the two against each other.
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
    Place,
    RecordEvent,
    Trace,
    Transfer,
    list_launches,
)

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
_SECTIONS = ("setup", "first_step", "step")
_FORWARD, _BACKWARD = "forward", ("backward", "recompute")


class CannotExtend(Exception):
    """The traces do not repeat as they would have to; the message says where."""


@dataclass(frozen=True)
class Depth:
    """The blocks of one pipeline stage in the whole model: `count` of them, the first with this number."""

    first: int
    count: int


@dataclass(slots=True)
class _Unit:
    """parts: of a sweep one for each block, in the order in which they come; of a series or another event, one for each event.
    stage: of a sweep, whose blocks these are. steps: the direction of a sweep, else 0. series: equal events."""

    parts: list[list[Event]]
    stage: int = -1
    steps: int = 0
    series: bool = False
    template: int = 0  # of a sweep: the part that is repeated


@dataclass(frozen=True)
class _Spot:
    """Where an event is: unit, part and number within the part."""

    unit: int
    part: int
    number: int


Reference: TypeAlias = tuple[str, int, int, int]
"""How ("block" apart, from the "start", from the "end"), unit, distance, number within the part."""


@dataclass
class _Parsed:
    """A trace in units. spots: of what is referred to, by kind and number; targets: of what refers, by its own spot."""

    depth: int
    units: list[_Unit] = field(default_factory=list)
    sections: list[int] = field(default_factory=list)  # units before each section
    targets: dict[_Spot, _Spot] = field(default_factory=dict)

    def block(self, spot: _Spot) -> int:
        """Number of the block within its stage, counted from 0; of a series, of the event."""
        unit = self.units[spot.unit]
        return spot.part if unit.steps >= 0 else len(unit.parts) - 1 - spot.part


def extend(small: Trace, big: Trace, *, depth: int, stages: Sequence[Depth]) -> Trace:
    """The trace of a rank of the whole model, from those with `depth` and `depth` + 1 blocks in every stage.

    stages: of the whole model, all of them, each with at least depth + 1 blocks. Raises CannotExtend.
    """
    few, more = _parse(small, depth), _parse(big, depth + 1)
    if len(few.units) != len(more.units) or few.sections != more.sections:
        raise CannotExtend(
            f"{len(few.units)} parts with {depth} blocks, {len(more.units)} with one more"
        )
    return _Extension(few, more, stages).trace(big)


# ---- cutting a trace into units ------------------------------------------------------------------


def _parse(trace: Trace, depth: int) -> _Parsed:
    parsed = _Parsed(depth)
    made: dict[int, Allocate] = {}
    for section in _SECTIONS:
        events: list[Event] = getattr(trace, section)
        for event in events:
            if isinstance(event, Allocate):
                made[event.block] = event
        parsed.sections.append(len(parsed.units))
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
            parsed.units += _units(events[begin:end], labels[begin:end], made, depth)
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
        place = getattr(event, "place", None)
        if place is not None:
            phase = (_FORWARD if place.phase not in _BACKWARD else "backward", place.action)
            layer = _layer(place)
            here = None if layer is None else ((*phase, layer // depth), layer)
        elif isinstance(event, Free) and here is None:
            layer = _layer(made[event.block].place)
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


def _layer(place: Place) -> int | None:
    return _layer_of(place.module)


@functools.cache
def _layer_of(module: str) -> int | None:
    match = _LAYER.search(module)
    return int(match[1]) if match else None


@functools.cache
def _any_layer(module: str) -> str:
    return _LAYER.sub("layers.*", module)


def _units(
    events: Sequence[Event], labels: Sequence[Any], made: dict[int, Allocate], depth: int
) -> Iterator[_Unit]:
    """Neighbouring events of one group: sweeps where they go through all blocks of a stage, and what is left."""
    if labels[0] is None:
        yield _Unit([[events[0]]])
        return
    runs: list[tuple[int, list[Event]]] = []
    for event, (_, layer) in zip(events, labels, strict=True):
        steps = 0 if len(runs) < 2 else runs[-1][0] - runs[-2][0]
        if len(runs) == depth and layer == runs[0][0]:  # and once more from the beginning
            yield from _sweep(runs, depth)
            runs = [(layer, [event])]
        # Something of a block that came before (its prefetch, its end) belongs to the block at hand.
        elif runs and (layer == runs[-1][0] or (steps and (layer - runs[-1][0]) * steps < 0)):
            runs[-1][1].append(event)
        else:
            runs.append((layer, [event]))
    yield from _sweep(runs, depth)


def _sweep(runs: Sequence[tuple[int, list[Event]]], depth: int) -> Iterator[_Unit]:
    """One unit, if it is a sweep, or one for each event."""
    stage = runs[0][0] // depth
    layers = [layer - stage * depth for layer, _ in runs]
    if layers in ([*range(depth)], [*reversed(range(depth))]):
        yield _Unit([run for _, run in runs], stage=stage, steps=1 if layers[0] == 0 else -1)
        return
    for _, run in runs:
        for event in run:
            yield _Unit([[event]])


def _alike(event: Allocate | RecordEvent) -> Any:
    """Equal for events that may form a series."""
    if isinstance(event, RecordEvent):
        return event.stream
    return (event.size_bytes, event.stream, event.category, event.place)


def _join_series(parsed: _Parsed) -> None:
    """Lone equal allocations, or records of events, that follow each other become one unit; and what frees such a series in order."""
    home: dict[
        int, tuple[_Unit, int]
    ] = {}  # of a lone block: its unit, and its place among the parts
    joined: list[_Unit] = []
    starts: list[int] = []
    last: Any = None
    for number, unit in enumerate(parsed.units):
        if number in parsed.sections:
            starts += [len(joined)] * parsed.sections.count(number)
            last = None
        event, key = unit.parts[0][0], None
        if not unit.steps and isinstance(event, Allocate | RecordEvent):
            key = _alike(event)
            if key != last:
                joined.append(unit)
            else:
                joined[-1].parts.append(unit.parts[0])
                joined[-1].series = True
            if isinstance(event, Allocate):
                home[event.block] = (joined[-1], len(joined[-1].parts) - 1)
        elif not unit.steps and isinstance(event, Free) and event.block in home:
            taken, place = home[event.block]
            key = (id(taken), place)
            # Lists give back their tensors from the end, loops from the beginning.
            if taken.series and last in [
                (id(taken), place - 1, 1),
                (id(taken), place + 1, -1),
                (id(taken), place - 1),
                (id(taken), place + 1),
            ]:
                joined[-1].parts.append(unit.parts[0])
                joined[-1].series = True
                key = (id(taken), place, place - last[1])
            else:
                joined.append(unit)
        else:
            joined.append(unit)
        last = key
    starts += [len(joined)] * (len(parsed.sections) - len(starts))
    parsed.units, parsed.sections = joined, starts


def _find_targets(parsed: _Parsed) -> None:
    _join_series(parsed)
    blocks: dict[int, _Spot] = {}
    events: dict[int, _Spot] = {}
    works: dict[int, _Spot] = {}
    for spot, event in _all(parsed.units):
        if isinstance(event, Allocate):
            blocks[event.block] = spot
        elif isinstance(event, RecordEvent):
            events[event.event] = spot
        elif isinstance(event, Transfer):
            if event.work in works:
                parsed.targets[spot] = works[event.work]
            else:
                works[event.work] = spot
        elif isinstance(event, Free):
            parsed.targets[spot] = blocks[event.block]
        elif isinstance(event, AwaitEvent) and event.event in events:
            parsed.targets[spot] = events[event.event]
        elif isinstance(event, AwaitWork) and event.work in works:
            parsed.targets[spot] = works[event.work]


def _all(units: Sequence[_Unit]) -> Iterator[tuple[_Spot, Event]]:
    for u, unit in enumerate(units):
        for p, part in enumerate(unit.parts):
            for n, event in enumerate(part):
                yield _Spot(u, p, n), event


# ---- putting together a deeper one -----------------------------------------------------------------


class _Extension:
    """Units of two depths, matched, and the trace that follows from them. few and more: with a block less and more."""

    def __init__(self, few: _Parsed, more: _Parsed, stages: Sequence[Depth]) -> None:
        self.few, self.more, self.stages = few, more, stages
        self.used = sorted({unit.stage for unit in more.units if unit.steps})
        if not self.used:
            raise CannotExtend("no pass through the blocks was found")
        self.num_added = sum(stages[stage].count - more.depth for stage in self.used)
        self.lengths = [self._length(number) for number in range(len(more.units))]
        self.references = {
            number: self._references(number, unit) for number, unit in enumerate(more.units)
        }
        for number, unit in enumerate(more.units):
            if unit.steps:
                unit.template = self._find_template(number, unit)

    def _fail(self, number: int, why: str, spot: _Spot | None = None) -> CannotExtend:
        parts = self.more.units[number].parts
        return CannotExtend(f"{why}: {parts[spot.part][spot.number] if spot else parts[0][0]}")

    def _grown(self, few: int, more: int) -> int:
        """A number that grows with the blocks, at the whole model's depth."""
        added = (more - few) * self.num_added
        if added % len(self.used):
            raise CannotExtend(f"{few} and {more} do not grow evenly with the blocks")
        return more + added // len(self.used)

    def _length(self, number: int) -> int:
        """Parts of a unit in the whole model's trace."""
        few, more = self.few.units[number], self.more.units[number]
        if (few.steps, few.stage) != (more.steps, more.stage):
            raise self._fail(number, "one depth passes through the blocks where the other does not")
        if more.steps:
            return self.stages[more.stage].count
        return self._grown(len(few.parts), len(more.parts))

    def _source(self, unit: _Unit, part: int, length: int) -> int:
        """Which part of the deeper trace a part of the whole model's is made from."""
        depth = len(unit.parts)
        if part <= unit.template:
            return part
        return depth - (length - part) if length - part < depth - unit.template else unit.template

    # ---- references

    def _references(self, number: int, unit: _Unit) -> list[list[Reference | None]]:
        return [
            [self._reference(_Spot(number, p, n)) for n in range(len(part))]
            for p, part in enumerate(unit.parts)
        ]

    def _reference(self, spot: _Spot) -> Reference | None:
        """What an event refers to, as it holds at both depths."""
        target = self.more.targets.get(spot)
        if target is None:
            return None
        own, other = self.more.units[spot.unit], self.more.units[target.unit]
        block, last = self.more.block(target), len(other.parts) - 1
        if own.series and other.series:
            if self._is_even(spot.unit, lambda s, t: t.part - s.part):
                return ("block", target.unit, block - spot.part, target.number)
            if self._is_even(spot.unit, lambda s, t: t.part + s.part):
                return ("mirror", target.unit, last - block - spot.part, target.number)
            raise self._fail(spot.unit, "frees blocks in an order of its own")
        if last == 0:
            return ("start", target.unit, 0, target.number)
        few = self.few.units[spot.unit]
        removed = len(own.parts) - len(few.parts)
        same = _Spot(
            spot.unit,
            spot.part if spot.part < len(own.parts) / 2 else spot.part - removed,
            spot.number,
        )
        twin = self.few.targets.get(same)
        if twin is None or twin.unit != target.unit:
            raise self._fail(spot.unit, "refers to different things at different depths", spot)
        was, its_last = self.few.block(twin), len(self.few.units[twin.unit].parts) - 1
        if own.steps and block - self.more.block(spot) == was - self.few.block(same):
            return ("block", target.unit, block - self.more.block(spot), target.number)
        if block == was:
            return ("start", target.unit, block, target.number)
        if last - block == its_last - was:
            return ("end", target.unit, last - block, target.number)
        raise self._fail(spot.unit, "refers to different blocks at different depths", spot)

    def _is_even(self, number: int, relation: Callable[[_Spot, _Spot], int]) -> bool:
        """Whether all parts of a series refer alike."""
        found = set()
        for p in range(len(self.more.units[number].parts)):
            spot = _Spot(number, p, 0)
            target = self.more.targets.get(spot)
            found.add(None if target is None else (target.unit, relation(spot, target)))
        return len(found) == 1

    def _find_template(self, number: int, unit: _Unit) -> int:
        """A part in the middle that is as the next one is."""
        few, references = self.few.units[number], self.references[number]
        for one, other in ((few.parts[0], unit.parts[0]), (few.parts[-1], unit.parts[-1])):
            if [*map(_shape, one)] != [*map(_shape, other)]:
                raise self._fail(number, "the first or the last block differs with the depth")
        for t in range(1, len(unit.parts) - 2):
            alike = [*map(_shape, unit.parts[t])] == [*map(_shape, unit.parts[t + 1])]
            if alike and references[t] == references[t + 1]:
                return t
        raise self._fail(number, "neighbouring blocks differ")

    # ---- the trace

    def trace(self, big: Trace) -> Trace:
        self.blocks: dict[_Spot, int] = {}
        self.places: dict[tuple[Place, int], Place] = {}
        self.kernels: dict[Kernel, Kernel] = {}
        result = Trace(big.rank, big.world_size, groups=big.groups)
        bounds = [*self.more.sections, len(self.more.units)]
        for section, first, end in zip(_SECTIONS, bounds, bounds[1:], strict=False):
            events: list[Event] = []
            for number in range(first, end):
                self._emit(number, events)
            setattr(result, section, events)
        return result

    def _emit(self, number: int, events: list[Event]) -> None:
        unit, length = self.more.units[number], self.lengths[number]
        for part in range(length):
            source = (
                self._source(unit, part, length) if unit.steps else min(part, len(unit.parts) - 1)
            )
            for n, event in enumerate(unit.parts[source]):
                spot = _Spot(number, part, n)
                # Beyond what was traced of a series, an event refers as its neighbours do.
                reference = self.references[number][source][n]
                target = None if reference is None else self._resolve(reference, spot)
                grown = event if unit.steps else self._grow(number, source, n, event)
                events.append(self._copy(grown, spot, target, self._layer(unit, part)))

    def _resolve(self, reference: Reference, spot: _Spot) -> _Spot:
        kind, number, distance, n = reference
        unit, length = self.more.units[number], self.lengths[number]
        if kind == "start":
            block = distance
        elif kind == "end":
            block = length - 1 - distance
        elif kind == "mirror":
            block = length - 1 - distance - spot.part
        else:
            own = self.more.units[spot.unit]
            block = distance + (
                spot.part if own.steps >= 0 else self.lengths[spot.unit] - 1 - spot.part
            )
        return _Spot(number, block if unit.steps >= 0 else length - 1 - block, n)

    def _layer(self, unit: _Unit, part: int) -> Callable[[int], int]:
        """Numbers of blocks in the deeper trace to those in the whole model."""
        depth = self.more.depth

        def of_lone_event(layer: int) -> int:
            stage, block = divmod(layer, depth)
            of = self.stages[stage]
            return of.first + (block if block < depth / 2 else of.count - (depth - block))

        if not unit.steps:
            return of_lone_event
        of = self.stages[unit.stage]
        source = self._source(unit, part, of.count)
        is_at = part if unit.steps > 0 else of.count - 1 - part
        was_at = unit.stage * depth + (source if unit.steps > 0 else depth - 1 - source)
        return lambda layer: of.first + is_at + (layer - was_at)

    def _grow(self, number: int, part: int, n: int, event: Event) -> Event:
        few = self.few.units[number].parts
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
            raise CannotExtend(f"{few.name} where the deeper trace has {more.name}")
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
        self, event: Event, spot: _Spot, target: _Spot | None, layer: Callable[[int], int]
    ) -> Event:
        """The event with numbers and places of the whole model."""
        of = self.blocks
        # -1: it refers to something from before the trace began
        refers = -1 if target is None else of[target]
        match event:
            case Launch():
                return Launch(event.kernel, event.stream, self._place(event.place, layer))
            case Allocate():
                of[spot] = len(of)
                place = self._place(event.place, layer)
                return Allocate(of[spot], event.size_bytes, event.stream, event.category, place)
            case Free():
                return Free(refers)
            case Transfer():
                if target is None:
                    refers = of[spot] = len(of)
                return replace(event, work=refers, place=self._place(event.place, layer))
            case RecordEvent():
                of[spot] = len(of)
                return RecordEvent(event.stream, of[spot])
            case AwaitEvent():
                return AwaitEvent(event.stream, refers)
            case AwaitWork():
                return AwaitWork(event.stream, refers, event.host)
            case _:
                return event

    def _place(self, place: Place, layer: Callable[[int], int]) -> Place:
        found = _layer(place)
        if found is None:
            return place
        number = layer(found)
        key = (place, number)
        if key not in self.places:
            module = _LAYER.sub(f"layers.{number}", place.module, count=1)
            self.places[key] = replace(place, module=module)
        return self.places[key]


def _shape(event: Event) -> Any:
    """What neighbouring blocks must have in common: all but references and the number of the block."""
    kind = type(event)
    values: list[Any] = [kind]
    for name in _compared(kind):
        value = getattr(event, name)
        if name == "place":
            value = (value.phase, _any_layer(value.module), value.action)
        values.append(value)
    return values


@functools.cache
def _compared(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.name not in ("block", "event", "work")]
