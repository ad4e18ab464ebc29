"""Segments of a trace: parts that repeat with the blocks of a model, and the references between events.

repeat.py defines the three kinds of segments (layer passes, series, single events) and uses
them. Imports no torch.

Example: a model of 2 blocks, recorded on one rank. The step has 10 events, which make 4 segments:

    0  forward pass    parts [Allocate 100, Launch of layers.0], [Allocate 101, Launch of layers.1]
    1  single event    part  [Launch of norm]
    2  backward pass   parts [Launch of layers.1, Free 101], [Launch of layers.0, Free 100]
    3  single event    part  [Launch of the update]

Segments 0 and 2 are layer passes of stage 0, with directions 1 and -1. "Free 101" is
EventId(segment=2, part=0, number=1). It refers to "Allocate 101", which is EventId(0, 1, 0). Part 0
of the backward pass is block 1, and so is part 1 of the forward pass: the relative distance between
their blocks is 0. It is also 0 for "Free 100", and in a model of any depth. The absolute distance
from the first block is 1 for "Free 101" and 0 for "Free 100".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from titan.sim.record.trace import (
    BEGINS,
    Allocate,
    AwaitEvent,
    Event,
    Free,
    RecordEvent,
    Scope,
    Trace,
    compared_fields,
    number_of,
    scope_of,
)

# "layers.3" as a whole component of a module path: of the model itself, whose depth may vary, and anywhere.
LAYER = re.compile(r"^layers\.(\d+)(?![^.])")
_ANY_LAYER = re.compile(r"(?<![^.])layers\.\d+(?![^.])")
SECTIONS = ("setup", "first_step", "step")
# A recomputation runs in the middle of a backward pass, in the same direction.
_FORWARD, _BACKWARD = "forward", ("backward", "recompute")


@dataclass(slots=True)
class Segment:
    """A layer pass, a series, or a single event.

    Attributes:
        parts: events of each block, in the order of their recording. Outside layer passes, one
            event for each part.
        section: section of the trace: "setup", "first_step" or "step".
        stage: pipeline stage of a layer pass; -1 for other segments.
        direction: 1 for a layer pass from the first block to the last, -1 for the reverse; 0 for
            other segments.
        series: whether the parts are equal events outside of blocks.
        of_block: whether it is a single event of a block, and so does not grow.
        template: part to repeat in a deeper model; its successor is equal.
    """

    parts: list[list[Event]]
    section: str = ""
    stage: int = -1
    direction: int = 0
    series: bool = False
    of_block: bool = False
    template: int = 0

    def block(self, part: int, length: int) -> int:
        """Return the number of a part's block among `length` blocks, or the part of a block.

        Downwards, the first part is the last block.
        """
        return part if self.direction >= 0 else length - 1 - part


class EventId(NamedTuple):
    """Place of an event in a parsed trace.

    Attributes:
        segment: number of the segment.
        part: number of the part within the segment.
        number: number of the event within the part.
    """

    segment: int
    part: int
    number: int


@dataclass
class ParsedTrace:
    """A trace in segments.

    Attributes:
        depth: number of blocks in each pipeline stage.
        segments: all segments, in order.
        targets: the event that each referring event refers to. A Free refers to its Allocate, for
            example.
    """

    depth: int
    segments: list[Segment] = field(default_factory=list)
    targets: dict[EventId, EventId] = field(default_factory=dict)

    def distance(
        self, event: EventId, target: EventId, *, from_end: bool, relative: bool
    ) -> int:
        """Return the distance of a target's block from an end of its segment.

        In a layer pass, blocks are numbered within their stage. In a series, each event counts as a
        block.

        Args:
            event: the event that refers.
            target: the event that it refers to.
            from_end: count from the last block of the target's segment, not from the first.
            relative: subtract the number of the event's own block.
        """
        own, other = self.segments[event.segment], self.segments[target.segment]
        block = other.block(target.part, len(other.parts))
        if from_end:
            block = len(other.parts) - 1 - block
        return block - own.block(event.part, len(own.parts)) * relative


def parse_trace(trace: Trace, depth: int) -> ParsedTrace:
    """Return a trace in segments. The model had `depth` blocks in each stage."""
    parsed = ParsedTrace(depth)
    # From all sections so far: the step frees what the first step allocated.
    allocations: dict[int, Allocate] = {}
    for section in SECTIONS:
        events: list[Event] = getattr(trace, section)
        for event in events:
            if isinstance(event, Allocate):
                allocations[event.block] = event
        # Sections are cut separately, so no segment crosses from one into the next.
        first = len(parsed.segments)
        labels = _labels(events, allocations, depth)
        labelled = zip(events, labels, strict=True)
        # Events of one group have phase, pipeline action and stage in common.
        for group, run in groupby(labelled, key=lambda pair: pair[1] and pair[1][0]):
            if group is None:
                parsed.segments += (Segment([[event]]) for event, _ in run)
            else:
                parsed.segments += _segments(run, depth)
        for segment in parsed.segments[first:]:
            segment.section = section
    # References need the final segments, so they are found after series were joined.
    _find_targets(parsed)
    return parsed


def _labels(events: Sequence[Event], allocations: dict[int, Allocate], depth: int) -> list[Any]:
    """Return ((phase, action, stage), block) for each event that belongs to a block, and None for other events."""
    labels: list[Any] = []
    # Label of the last event with a scope.
    current = None
    phase = ("",)
    for event in events:
        # An event without a scope has the label of the event before it.
        scope = scope_of(event)
        if scope is not None:
            phase = (_FORWARD if scope.phase not in _BACKWARD else "backward", scope.action)
            layer = block_of(scope)
            # The stage is a part of the label: blocks are numbered through all stages.
            current = None if layer is None else ((*phase, layer // depth), layer)
        # A Free outside all blocks belongs to the block that allocated the memory: gradients and
        # optimizer states are given back in the order of their blocks.
        elif isinstance(event, Free) and current is None:
            layer = block_of(allocations[event.block].scope)
            labels.append(None if layer is None else ((*phase, "free", layer // depth), layer))
            continue
        labels.append(current)
    _label_waits(events, labels, depth)
    return labels


def _label_waits(events: Sequence[Event], labels: list[Any], depth: int) -> None:
    """Assign waits to blocks if a stream awaits events of at least `depth` blocks, as FSDP does after a backward pass."""
    # By number of an event: the block that recorded it.
    recorded: dict[int, int | None] = {}
    block = None
    for event in events:
        if scope := scope_of(event):
            block = block_of(scope)
        elif isinstance(event, RecordEvent):
            recorded[event.event] = block
    for waits, run in groupby(range(len(events)), lambda n: isinstance(events[n], AwaitEvent)):
        if not waits:
            continue
        awaited = {n: recorded.get(getattr(events[n], "event", -1)) for n in run}
        # If fewer blocks are awaited, the waits keep their labels.
        if len({*awaited.values()} - {None}) >= depth:
            for n, layer in awaited.items():
                labels[n] = None if layer is None else (("wait", layer // depth), layer)


def block_of(scope: Scope) -> int | None:
    """Return the number of the block that contains a scope, or None."""
    return _layer_of(scope.module)


@functools.cache
def _layer_of(module: str) -> int | None:
    """Return the number of the block that contains a module, or None."""
    match = LAYER.search(module)
    return int(match[1]) if match else None


@functools.cache
def any_layer(module: str) -> str:
    """Return the path of a module with "*" in place of the block's number."""
    return _ANY_LAYER.sub("layers.*", module)


def shape_of(event: Event) -> Any:
    """Return the fields that equal events of different blocks have in common: all but references and the block's number."""
    kind, scope = type(event), scope_of(event)
    where = scope and (scope.phase, any_layer(scope.module), scope.action, scope.call)
    return [kind, where, *(getattr(event, name) for name in compared_fields(kind))]


def _segments(
    labelled: Iterable[tuple[Event, tuple[Any, int]]], depth: int
) -> Iterator[Segment]:
    """Cut consecutive events of one label into layer passes, and into single events if no pass is complete."""
    # Neighbouring events of one block make a run; a complete pass is one run for each block.
    runs: list[tuple[int, list[Event]]] = []
    for event, (group, layer) in labelled:
        direction = 0 if len(runs) < 2 else runs[-1][0] - runs[-2][0]
        # A complete pass, and the next pass begins at the same end. Free events may concern blocks with experts alone.
        turns = "free" in group and (layer - runs[-1][0]) * direction < 0 if runs else False
        if turns or (len(runs) == depth and layer == runs[0][0]):
            yield from _layer_pass(runs, depth)
            runs = [(layer, [event])]
        # An event of an earlier block (its prefetch, its end) belongs to the current block.
        elif runs and (
            layer == runs[-1][0] or (direction and (layer - runs[-1][0]) * direction < 0)
        ):
            runs[-1][1].append(event)
        else:
            runs.append((layer, [event]))
    # The last pass has no successor that would end it.
    yield from _layer_pass(runs, depth)


def _layer_pass(runs: Sequence[tuple[int, list[Event]]], depth: int) -> Iterator[Segment]:
    """Yield one segment for a layer pass, or one for each event if the runs are no layer pass."""
    stage = runs[0][0] // depth
    layers = [layer - stage * depth for layer, _ in runs]
    parts = [run for _, run in runs]
    # All blocks of the stage in order; or only the blocks with experts, which follow dense blocks with empty parts. An
    # incomplete pass is not repeated.
    missing: list[list[Event]] = [[] for _ in range(depth - len(layers))]
    present = [*range(len(missing), depth)]
    if layers == present and (len(layers) > 1 or not missing):
        yield Segment([*missing, *parts], stage=stage, direction=1)
        return
    if layers == present[::-1] and len(layers) > 1:
        yield Segment([*parts, *missing], stage=stage, direction=-1)
        return
    for _, run in runs:
        for event in run:
            yield Segment([[event]], of_block=True)


def _join_series(parsed: ParsedTrace) -> None:
    """Join consecutive equal single events: allocations, records of events, and the Free events of such a series."""
    # Segment of each block of memory that a single event allocated.
    home: dict[int, Segment] = {}
    joined: list[Segment] = []
    last = None
    for segment in parsed.segments:
        event, key = None if segment.direction else segment.parts[0][0], None
        # Outside layer passes, an event joins the series of equal ones before it.
        if isinstance(event, Allocate):
            key = (event.size_bytes, event.stream, event.category, event.scope)
        elif isinstance(event, RecordEvent):
            key = (event.stream,)
        # The references describe the order in which another series is freed.
        elif isinstance(event, Free) and event.block in home and home[event.block].series:
            key = id(home[event.block])
        if key is not None and (segment.section, key) == last:
            joined[-1].parts += segment.parts
            joined[-1].series = True
        else:
            joined.append(segment)
        if isinstance(event, Allocate):
            home[event.block] = joined[-1]
        last = (segment.section, key)
    parsed.segments = joined


def _find_targets(parsed: ParsedTrace) -> None:
    """Store the target of each event that refers to another event, after joining series."""
    _join_series(parsed)
    known: dict[tuple[str, int], EventId] = {}
    for event_id, event in _all(parsed.segments):
        key = number_of(event)
        if key is None:
            continue
        if isinstance(event, BEGINS):
            first = known.setdefault(key, event_id)
            # Transfers of one work refer to the first of them.
            if first is not event_id:
                parsed.targets[event_id] = first
        # Events recorded before the trace are done, and need no reference.
        elif key in known:
            parsed.targets[event_id] = known[key]


def _all(segments: Sequence[Segment]) -> Iterator[tuple[EventId, Event]]:
    """Yield all events with their places."""
    for u, segment in enumerate(segments):
        for p, part in enumerate(segment.parts):
            for n, event in enumerate(part):
                yield EventId(u, p, n), event
