"""Write a simulated step as Chakra execution traces of MLCommons (arXiv:2305.14516), a file for each traced rank and one of groups.

A file is messages of Chakra's schema/protobuf/et_def.proto, each behind its length as a varint: GlobalMetadata, then a Node for each
kernel and each transfer. Attributes have the names and types that Chakra's feeder reads. A node depends on the one before it on its
stream, on what its stream or the host was made to wait for, and, on a group's own stream, also on the stream that issued it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from titan.sim.record.trace import (
    HOST,
    AwaitEvent,
    AwaitStream,
    AwaitWork,
    Group,
    Launch,
    RecordEvent,
    Synchronize,
    Trace,
    Transfer,
)
from titan.sim.replay.timeline import RankTimeline, axis_of
from titan.sim.simulate import StepSimulation

# Numbers of et_def.proto: types of nodes, of collectives, and fields of an attribute.
_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}  # fmt: skip
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29


def write_chakra(simulation: StepSimulation, folder: Path) -> None:
    """Write rank.N.et for each traced rank, and groups.json: the ranks of each process group by its number. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[tuple[int, ...], int] = {}
    for rank, trace in simulation.traces.items():
        nodes = _nodes(trace, simulation.timeline.ranks[rank], numbers)
        messages = [_field(1, "0.0.4") + _attribute(2, "schema", _STRING, "titan"), *nodes]
        content = b"".join(_varint(len(message)) + message for message in messages)
        (folder / f"rank.{rank}.et").write_bytes(content)
    groups = json.dumps({str(number): ranks for ranks, number in numbers.items()})
    (folder / "groups.json").write_text(groups, encoding="utf-8")


def _nodes(
    trace: Trace, timeline: RankTimeline, numbers: dict[tuple[int, ...], int]
) -> list[bytes]:
    """Return the nodes of a rank's step. numbers: of groups, to which those of this rank are added."""
    times = {id(what): (start, end) for start, end, what in timeline.host}
    times |= {id(i.event): (i.start, i.end) for i in timeline.intervals}
    begin_s = min((start for start, _ in times.values()), default=0.0)
    # What the next node of a stream, of a group's stream or of the host (HOST) waits for, and what events and works stand for.
    last: defaultdict[Any, set[int]] = defaultdict(set)
    events: dict[int, set[int]] = {}
    works: defaultdict[int, set[int]] = defaultdict(set)
    issued: dict[int, set[int]] = {}  # what the transfers of a work depend on
    nodes: list[bytes] = []
    for event in trace.step:
        match event:
            case Launch() | Transfer():
                number, detached = len(nodes) + 1, isinstance(event, Transfer) and event.detached
                own = event.group if isinstance(event, Transfer) and detached else event.stream
                parents = last[own] | last[event.stream] | last[HOST]
                last[own] = {number}
                if isinstance(event, Transfer):  # those of one work run together
                    parents = issued.setdefault(event.work, parents)
                    works[event.work].add(number)
                    last[own] = {*works[event.work]}
                start, end = times[id(event)]
                nodes.append(_node(event, number, parents, start - begin_s, end - start, trace, numbers))  # fmt: skip
            case RecordEvent():
                events[event.event] = {*last[event.stream]}
            case AwaitEvent():
                last[event.stream] |= events.get(event.event, set())
            case AwaitStream():
                last[event.stream] |= last[event.other]
            case AwaitWork():
                last[HOST if event.host else event.stream] |= works[event.work]
            case Synchronize():
                streams = [event.stream] if event.stream >= 0 else [*last]
                last[HOST] |= set().union(*(last[stream] for stream in streams))
    return nodes


def _node(
    what: Launch | Transfer,
    number: int,
    parents: set[int],
    start_s: float,
    duration_s: float,
    trace: Trace,
    numbers: dict[tuple[int, ...], int],
) -> bytes:
    """Return a node. Durations are whole microseconds in the schema, so an attribute has nanoseconds."""
    attributes: list[tuple[str, int, int | str]] = [("is_cpu_op", _BOOL, what.stream == HOST)]
    if isinstance(what, Launch):
        kind, name, kernel = _COMPUTE, what.kernel.name, what.kernel
        attributes.append(("num_ops", _INT64, kernel.flops))
        attributes.append(("tensor_size", _UINT64, kernel.read_bytes + kernel.write_bytes))
    else:
        group: Group = trace.groups[what.group]
        kind, name = _COLLECTIVE, f"{what.kind} {axis_of(group)}"
        attributes.append(("comm_size", _INT64, what.size_bytes))
        if what.peer >= 0:
            is_send = what.kind == "send"
            kind = _SEND if is_send else _RECV
            source, target = (trace.rank, what.peer) if is_send else (what.peer, trace.rank)
            attributes += [("comm_src", _INT32, source), ("comm_dst", _INT32, target)]
        else:
            group_number = numbers.setdefault(group.ranks, len(numbers) + 1)
            attributes.append(("comm_type", _INT64, _COLLECTIVES[what.kind]))
            attributes.append(("pg_name", _STRING, str(group_number)))
    attributes += [("phase", _STRING, what.scope.phase), ("module", _STRING, what.scope.module)]
    attributes.append(("duration_nanos", _INT64, round(duration_s * 1e9)))
    fields = [
        _field(1, number),
        _field(2, name),
        _field(3, kind),
        _field(5, b"".join(map(_varint, sorted(parents)))),
        _field(6, round(start_s * 1e6)),
        _field(7, round(duration_s * 1e6)),
    ]
    return b"".join([*fields, *(_attribute(10, *attribute) for attribute in attributes)])


def _attribute(number: int, name: str, kind: int, value: int | str) -> bytes:
    return _field(number, _field(1, name) + _field(kind, value))


def _field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of protobuf's wire format: a varint, or text or a message behind its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest first, with the top bit set in all but the last."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
