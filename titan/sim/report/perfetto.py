"""A simulated step in torch.profiler's format, for ui.perfetto.dev, chrome://tracing and Holistic Trace Analysis (HTA).

A trace has a process for each rank, with a lane for its host and one for each stream, and the
memory in use by category.

The format is that of the Trace Event document (Google, 2016). HTA wants a file for each rank, with
the rank in "distributedInfo" at its beginning; torch's categories of events; a `stream` above 0, on
the device alone; one `correlation` of a kernel and its launch; NCCL's names of communication.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from titan.sim.record.trace import CATEGORIES, HOST, Allocate, Free, Launch, Trace, Transfer
from titan.sim.replay.timeline import RankTimeline, axis_of, lane_labels
from titan.sim.simulate import GIB, StepSimulation

_HOST_LANE, _FIRST_STREAM = 1, 7  # torch's default stream has number 7 in its traces
_NCCL = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "broadcast": "Broadcast",
}
"""Kernels of collectives. All others are made of sends and receives."""
Record = dict[str, Any]


def write_trace(simulation: StepSimulation, path: Path) -> None:
    """Write one step of all traced ranks into a file, or into a folder with a file for each rank.

    Raises:
        OSError: a file cannot be written.
    """
    timelines = simulation.timeline.ranks
    # The host is ahead of the device, and a trace begins at 0.
    starts = [start for t in timelines.values() for start, _, _ in t.host[:1]]
    starts += [interval.start for t in timelines.values() for interval in t.intervals[:1]]
    begin_s = min([0.0, *starts])
    events = {
        rank: [*_events(trace, timelines[rank], begin_s)]
        for rank, trace in simulation.traces.items()
    }
    files = {path: [*events]}
    if path.is_dir():
        files = {path / f"rank-{rank}.json": [rank] for rank in events}
    for file, ranks in files.items():
        data = {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": "nccl",
                "rank": ranks[0],
                "world_size": simulation.world_size,
            },
            "displayTimeUnit": "ms",
            "traceEvents": [event for rank in ranks for event in events[rank]],
        }
        file.write_text(json.dumps(data), encoding="utf-8")


def _events(trace: Trace, timeline: RankTimeline, begin_s: float) -> Iterator[Record]:
    """Yield the events of a rank: its host, its streams, and the memory in use."""

    def us(at_s: float) -> float:
        return round((at_s - begin_s) * 1e6, 3)

    def event(kind: str, tid: int, at_s: float, **values: Any) -> Record:
        return {"ph": kind, "pid": trace.rank, "tid": tid, "ts": us(at_s), **values}

    # "X" is a complete event, "s" and "f" begin and end an arrow, "M" gives a name, "C" is a
    # counter.
    def span(
        tid: int, start: float, end: float, name: str, category: str, **args: Any
    ) -> Record:
        args = {key: value for key, value in args.items() if value}
        dur = round(us(end) - us(start), 3)
        return event("X", tid, start, dur=dur, name=name, cat=category, args=args)

    def named(what: str, tid: int, name: str) -> Record:
        return {"ph": "M", "name": what, "pid": trace.rank, "tid": tid, "args": {"name": name}}

    arrow = {"name": "ac2g", "cat": "ac2g"}
    yield named("process_name", 0, f"rank {trace.rank}")
    yield named("thread_name", _HOST_LANE, "host")
    if host := timeline.host:
        yield span(_HOST_LANE, host[0][0], host[-1][1], "ProfilerStep#1", "user_annotation")
    # By identity: each launch is one object within a step.
    numbers: dict[int, int] = {}
    for start, end, what in host:
        if not isinstance(what, Launch | Transfer):
            yield span(_HOST_LANE, start, end, "cudaStreamSynchronize", "cuda_runtime")
            continue
        number = numbers[id(what)] = len(numbers) + 1
        name = what.kernel.name if isinstance(what, Launch) else f"c10d::{what.kind}"
        yield span(_HOST_LANE, start, end, name, "cpu_op", **_where(what, number))
        if what.stream != HOST:
            yield span(
                _HOST_LANE, start, end, "cudaLaunchKernel", "cuda_runtime", correlation=number
            )
            yield event("s", _HOST_LANE, start, id=number, **arrow)
    streams = {"compute": _FIRST_STREAM}
    yield named("thread_name", _FIRST_STREAM, "compute")
    labels = lane_labels(timeline.intervals, trace.groups)
    for lane, start, end, what in timeline.intervals:
        lane = labels[lane]
        if isinstance(what, Transfer) and what.kind in ("send", "recv"):
            lane += f", {what.kind}"  # both at once
        if lane not in streams:
            streams[lane] = _FIRST_STREAM + len(streams)
            yield named("thread_name", streams[lane], lane)
        stream, number = streams[lane], numbers[id(what)]
        details = {**_where(what, number), "correlation": number, "stream": stream}
        yield span(stream, start, end, *_named(what, trace), **details, **_details(what))
        yield event("f", stream, start, id=number, bp="e", **arrow)
    yield from (
        event("C", 0, at_s, name="memory, GiB", args=gib)
        for at_s, gib in _memory(trace, timeline)
    )


def _where(what: Launch | Transfer, number: int) -> Record:
    """Return the place of an event in the program."""
    scope = what.scope
    return {
        "External id": number,
        "phase": scope.phase,
        "module": scope.module,
        "action": scope.action,
    }


def _named(what: Launch | Transfer, trace: Trace) -> tuple[str, str]:
    """Return the name and the category of an event on the device."""
    if isinstance(what, Launch):
        copies = what.kernel.kind == "host_copy"
        return ("Memcpy " * copies + what.kernel.name, "gpu_memcpy" if copies else "kernel")
    if what.kind == "read":
        return "Memcpy PtoP", "gpu_memcpy"
    # Its content: the axis, and the module whose parameters or activations it transfers.
    carried = " ".join(filter(None, (axis_of(trace.groups[what.group]), what.scope.module)))
    return f"ncclDevKernel_{_NCCL.get(what.kind, 'SendRecv')}({carried})", "kernel"


def _details(what: Launch | Transfer) -> Record:
    """Return the arguments of an event on the device."""
    if isinstance(what, Transfer):
        return {"kind": what.kind, "group": what.group, "bytes": what.size_bytes}
    kernel = what.kernel
    return {
        "kind": kernel.kind,
        "shapes": str(kernel.shapes),
        "dtype": kernel.dtype,
        "flops": kernel.flops,
        "bytes": kernel.read_bytes + kernel.write_bytes,
    }


def _memory(trace: Trace, timeline: RankTimeline) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the GiB in use whenever a kernel starts.

    The host allocates ahead of that, in the same order.
    """
    starts = {id(interval.event): interval.start for interval in timeline.intervals}
    alive: dict[int, Allocate] = {}
    used = Counter(dict.fromkeys(CATEGORIES, 0))
    latest, first = -inf, len(trace.setup) + len(trace.first_step)
    for number, event in enumerate((*trace.setup, *trace.first_step, *trace.step)):
        if isinstance(event, Allocate):
            alive[event.block] = event
            used[event.category] += event.size_bytes
        elif isinstance(event, Free) and event.block in alive:
            freed = alive.pop(event.block)
            used[freed.category] -= freed.size_bytes
        elif number >= first and (start := starts.get(id(event), latest)) > latest:
            yield start, {name: size / GIB for name, size in used.items()}
            latest = start
