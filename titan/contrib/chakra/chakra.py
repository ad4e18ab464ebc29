"""Chakra execution traces (MLCommons, arXiv:2305.14516) of a simulated step: a file for each traced rank, and the groups.

A file is a sequence of messages of Chakra's schema/protobuf/et_def.proto, each behind its length as a varint:
GlobalMetadata, then a Node for each kernel and each transfer. Attributes have the names and types that Chakra's feeder
reads. A node depends on the previous node of its stream, and on everything that its stream or the host waits for. A
transfer on a group's own stream also depends on the stream that issued it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from titan.sim.record import trace as t
from titan.sim.replay.timeline import RankTimeline, axis_of
from titan.sim.simulate import StepSimulation

# Numbers of et_def.proto: types of nodes, of collectives, and fields of an attribute's value.
_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = {
    "all_reduce": 0,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
}
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
_Attributes = dict[str, tuple[int, int | str]]


def write_chakra(simulation: StepSimulation, folder: Path) -> None:
    """Write rank.N.et for each traced rank, and groups.json, the ranks of each process group by its number.

    Args:
        simulation: The simulated step.
        folder: Folder of the files, which is created.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[tuple[int, ...], int] = {}
    for rank, trace in simulation.traces.items():
        nodes = _nodes(trace, simulation.timeline.ranks[rank], numbers)
        content = [_varint(len(message)) + message for message in (_field(1, "0.0.4"), *nodes)]
        (folder / f"rank.{rank}.et").write_bytes(b"".join(content))
    (folder / "groups.json").write_text(
        json.dumps({str(number): ranks for ranks, number in numbers.items()}), encoding="utf-8"
    )


def _nodes(trace: t.Trace, timeline: RankTimeline, numbers: dict[Any, int]) -> list[bytes]:
    """Return the nodes of a rank's step. Groups of this rank are added to `numbers`, the numbers of groups by their ranks."""
    times = {id(what): (start, end) for start, end, what in timeline.host}
    times |= {id(i.event): (i.start, i.end) for i in timeline.intervals}
    begin_s = min((start for start, _ in times.values()), default=0.0)
    # Nodes that the next node depends on: by stream, by group's own stream, or for all streams after the host waited (HOST).
    last = defaultdict[Any, set[int]](set)
    events: dict[int, set[int]] = {}
    works = defaultdict[int, set[int]](set)
    issued: dict[int, set[int]] = {}  # nodes that the transfers of a work depend on
    nodes: list[bytes] = []
    for event in trace.step:
        if isinstance(event, t.Launch | t.Transfer):
            number, lane = len(nodes) + 1, event.stream
            if isinstance(event, t.Transfer):
                lane = event.group if event.detached else lane
                attributes = _of_transfer(event, trace, numbers)
            else:
                kernel = event.kernel
                size = kernel.read_bytes + kernel.write_bytes
                costs = {"num_ops": (_INT64, kernel.flops), "tensor_size": (_UINT64, size)}
                attributes = _COMPUTE, kernel.name, costs
            parents, last[lane] = last[lane] | last[event.stream] | last[t.HOST], {number}
            if isinstance(event, t.Transfer):  # transfers of one work run together
                parents = issued.setdefault(event.work, parents)
                works[event.work].add(number)
                last[lane] = {*works[event.work]}
            start, end = times[id(event)]
            nodes.append(
                _node(event, number, parents, start - begin_s, end - start, attributes)
            )
        elif isinstance(event, t.RecordEvent):
            events[event.event] = {*last[event.stream]}
        elif isinstance(event, t.AwaitEvent):
            last[event.stream] |= events.get(event.event, set())
        elif isinstance(event, t.AwaitStream):
            last[event.stream] |= last[event.other]
        elif isinstance(event, t.AwaitWork):
            last[t.HOST if event.host else event.stream] |= works[event.work]
        elif isinstance(event, t.Synchronize):
            awaited = [event.stream] if event.stream >= 0 else [*last]
            last[t.HOST] |= set().union(*(last[lane] for lane in awaited))
    return nodes


def _of_transfer(
    what: t.Transfer, trace: t.Trace, numbers: dict[Any, int]
) -> tuple[int, str, _Attributes]:
    """Return the type, the name and the attributes of a transfer's node."""
    group, kind = trace.groups[what.group], _COLLECTIVE
    attributes: _Attributes = {"comm_size": (_INT64, what.size_bytes)}
    if what.peer >= 0:
        kind = _SEND if what.kind == "send" else _RECV
        ends = (trace.rank, what.peer) if kind == _SEND else (what.peer, trace.rank)
        attributes |= {"comm_src": (_INT32, ends[0]), "comm_dst": (_INT32, ends[1])}
    else:
        number = numbers.setdefault(group.ranks, len(numbers) + 1)
        attributes |= {
            "comm_type": (_INT64, _COLLECTIVES[what.kind]),
            "pg_name": (_STRING, str(number)),
        }
    return kind, f"{what.kind} {axis_of(group)}", attributes


def _node(
    what: Any,
    number: int,
    parents: set[int],
    start_s: float,
    duration_s: float,
    description: Any,
) -> bytes:
    """Return a node. The schema has durations in whole microseconds, so an attribute has nanoseconds."""
    kind, name, attributes = description
    attributes |= {
        "is_cpu_op": (_BOOL, what.stream == t.HOST),
        "phase": (_STRING, what.scope.phase),
    }
    attributes |= {
        "module": (_STRING, what.scope.module),
        "duration_nanos": (_INT64, round(duration_s * 1e9)),
    }
    fields = [(1, number), (2, name), (3, kind), (5, b"".join(map(_varint, sorted(parents))))]
    fields += [(6, round(start_s * 1e6)), (7, round(duration_s * 1e6))]
    fields += [(10, _field(1, key) + _field(*value)) for key, value in attributes.items()]
    return b"".join(_field(*field) for field in fields)


def _field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of protobuf's wire format: a varint, or a length and the bytes of a text or message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a number as a varint: groups of 7 bits, the lowest first, with the top bit set in all but the last."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
