"""Cut a trace into segments that repeat with the blocks of a model, and find what refers to what. extrapolate.py uses them.

Segments are layer passes, series and single events; extrapolate.py defines them. Imports no torch.
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
    number_of,
)

# "layers.3" as a whole component of a module path: of the model itself, whose depth may vary, and anywhere.
LAYER = re.compile(r"^layers\.(\d+)(?![^.])")
_ANY_LAYER = re.compile(r"(?<![^.])layers\.\d+(?![^.])")
SECTIONS = ("setup", "first_step", "step")
# A recomputation runs in the middle of a backward pass, in the same direction.
_FORWARD, _BACKWARD = "forward", ("backward", "recompute")


@dataclass(slots=True)
class Segment:
    """Hold a layer pass, a series or a single event.

    parts: the events of each block, in the order in which they come. Outside layer passes, one event each.
    section: of the trace. stage, direction: of a layer pass, its pipeline stage, and 1 upwards or -1 downwards. Else -1 and 0.
    """

    parts: list[list[Event]]
    section: str = ""
    stage: int = -1
    direction: int = 0
    series: bool = False
    template: int = 0  # the part that is repeated

    def block(self, part: int, length: int) -> int:
        """Return the number of a part's block among `length` ones, or the other way round. Downwards, the first part is the last."""
        return part if self.direction >= 0 else length - 1 - part


class EventId(NamedTuple):
    """Name an event by its segment, its part, and its number within the part."""

    segment: int
    part: int
    number: int


@dataclass
class ParsedTrace:
    """Hold a trace in segments. targets: for each event that refers to another one, which."""

    depth: int
    segments: list[Segment] = field(default_factory=list)
    targets: dict[EventId, EventId] = field(default_factory=dict)

    def distance(self, event: EventId, target: EventId, *, from_end: bool, relative: bool) -> int:
        """Return how far the block that an event refers to is from an end of its segment, less the event's own if `relative`.

        Of a block its number within its stage counts, of an event outside blocks that within its series.
        """
        own, other = self.segments[event.segment], self.segments[target.segment]
        block = other.block(target.part, len(other.parts))
        if from_end:
            block = len(other.parts) - 1 - block
        return block - own.block(event.part, len(own.parts)) * relative


def parse_trace(trace: Trace, depth: int) -> ParsedTrace:
    """Return a trace in segments. It was recorded with `depth` blocks in each stage."""
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
    """Return ((phase, action, stage), block) of each event that belongs to a block, else None."""
    labels: list[Any] = []
    # Where the last event with a scope was.
    here: Any = None
    phase: Any = ("",)
    for event in events:
        # An event without a scope is where the one before it is.
        scope = getattr(event, "scope", None)
        if scope is not None:
            phase = (_FORWARD if scope.phase not in _BACKWARD else "backward", scope.action)
            layer = block_of(scope)
            # The stage is a part of the label: blocks are numbered through all stages.
            here = None if layer is None else ((*phase, layer // depth), layer)
        # What frees memory outside all blocks belongs to the block that took it: gradients and
        # optimizer states are given back in the order of their blocks.
        elif isinstance(event, Free) and here is None:
            layer = block_of(allocations[event.block].scope)
            labels.append(None if layer is None else ((*phase, "free", layer // depth), layer))
            continue
        labels.append(here)
    _label_waits(events, labels, depth)
    return labels


def _label_waits(events: Sequence[Event], labels: list[Any], depth: int) -> None:
    """Give each wait to its block where one stream awaits events of all blocks. FSDP does so after a backward pass."""
    # By number of an event: the block that recorded it.
    recorded = {
        event.event: label[1]
        for event, label in zip(events, labels, strict=True)
        if isinstance(event, RecordEvent) and label is not None
    }
    for waits, run in groupby(range(len(events)), lambda n: isinstance(events[n], AwaitEvent)):
        if not waits:
            continue
        awaited = {n: recorded.get(getattr(events[n], "event", -1)) for n in run}
        # Where fewer blocks are awaited, the waits stay where they are.
        if len({*awaited.values()} - {None}) >= depth:
            for n, layer in awaited.items():
                labels[n] = None if layer is None else (("wait", layer // depth), layer)


def block_of(scope: Scope) -> int | None:
    """Return the number of the block that a scope is in, or None."""
    return _layer_of(scope.module)


@functools.cache
def _layer_of(module: str) -> int | None:
    match = LAYER.search(module)
    return int(match[1]) if match else None


@functools.cache
def any_layer(module: str) -> str:
    """Return a module's path with "*" in place of its block's number."""
    return _ANY_LAYER.sub("layers.*", module)


def _segments(labelled: Iterable[tuple[Event, tuple[Any, int]]], depth: int) -> Iterator[Segment]:
    """Cut neighbouring events of one group into layer passes, and into single events where they are none."""
    # Neighbouring events of one block make a run; a complete pass is one run for each block.
    runs: list[tuple[int, list[Event]]] = []
    for event, (group, layer) in labelled:
        direction = 0 if len(runs) < 2 else runs[-1][0] - runs[-2][0]
        # A complete pass, and the next one begins at the same end. What is freed may be of blocks with experts alone.
        turns = "free" in group and (layer - runs[-1][0]) * direction < 0 if runs else False
        if turns or (len(runs) == depth and layer == runs[0][0]):
            yield from _layer_pass(runs, depth)
            runs = [(layer, [event])]
        # An event of an earlier block (its prefetch, its end) belongs to the block at hand.
        elif runs and (
            layer == runs[-1][0] or (direction and (layer - runs[-1][0]) * direction < 0)
        ):
            runs[-1][1].append(event)
        else:
            runs.append((layer, [event]))
    # The last pass has no successor that would end it.
    yield from _layer_pass(runs, depth)


def _layer_pass(runs: Sequence[tuple[int, list[Event]]], depth: int) -> Iterator[Segment]:
    """Yield one segment if this is a layer pass, else one for each event."""
    stage = runs[0][0] // depth
    layers = [layer - stage * depth for layer, _ in runs]
    parts = [run for _, run in runs]
    # All blocks of the stage, in order, or, after dense ones, those with experts: then dense blocks have empty parts.
    # Anything else (a part of a pass) is not repeated.
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
            yield Segment([[event]])


def _join_series(parsed: ParsedTrace) -> None:
    """Join equal single events that follow each other: allocations, records of events, and what frees such a series."""
    # Of a block that a single event allocated: the event's segment.
    home: dict[int, Segment] = {}
    joined: list[Segment] = []
    last: Any = None
    for segment in parsed.segments:
        event, key = None if segment.direction else segment.parts[0][0], None
        # Outside layer passes, an event joins the series of equal ones before it.
        if isinstance(event, Allocate):
            key = (event.size_bytes, event.stream, event.category, event.scope)
        elif isinstance(event, RecordEvent):
            key = (event.stream,)
        # In which order it frees another series is the references' matter.
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
    """Store for each event that refers to another one which it is. Join series before, since they
    change the segments."""
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
        # What was recorded before the trace is done, and needs no reference.
        elif key in known:
            parsed.targets[event_id] = known[key]


def _all(segments: Sequence[Segment]) -> Iterator[tuple[EventId, Event]]:
    for u, segment in enumerate(segments):
        for p, part in enumerate(segment.parts):
            for n, event in enumerate(part):
                yield EventId(u, p, n), event
