"""Write a simulated step as a trace for https://ui.perfetto.dev or chrome://tracing: a process for each rank, a lane for each stream,
and the memory in use by category.

The format is that of the Trace Event document (Google, 2016), which torch.profiler writes too.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .simulate import GIB, Simulation
from .timeline import Interval, axis_of, lane_labels
from .trace import CATEGORIES, Allocate, Free, Launch, Trace, Transfer


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write one step of all traced ranks. Raises OSError."""
    events: list[dict[str, Any]] = []
    for rank, timeline in simulation.timeline.ranks.items():
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        lanes: dict[str, int] = {}
        labels = lane_labels(timeline.intervals, simulation.traces[rank].groups)
        for interval in timeline.intervals:
            lane = labels[interval.lane]
            if not isinstance(interval.event, Launch) and interval.event.kind in ("send", "recv"):
                lane += f", {interval.event.kind}"  # both at once
            if lane not in lanes:
                lanes[lane] = len(lanes)
                events.append(_name("thread_name", rank, lanes[lane], lane))
            event = _event(interval, rank, lanes[lane])
            if isinstance(interval.event, Transfer):
                # What it carries: the axis, and the module whose parameters or activations these are.
                axis = axis_of(simulation.traces[rank].groups[interval.event.group])
                event["name"] = " ".join(
                    filter(None, (event["name"], axis, event["args"].get("module")))
                )
            events.append(event)
        events += _memory(simulation.traces[rank], timeline.intervals)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _memory(trace: Trace, intervals: Sequence[Interval]) -> Iterator[dict[str, Any]]:
    """Yield the bytes in use whenever a kernel starts. The host allocates ahead of that, in the same order."""
    starts: defaultdict[int, deque[float]] = defaultdict(deque)
    for interval in intervals:
        starts[id(interval.event)].append(interval.start)
    alive: dict[int, Allocate] = {}
    used = Counter(dict.fromkeys(CATEGORIES, 0))
    latest, first = -1.0, len(trace.setup) + len(trace.first_step)
    for number, event in enumerate((*trace.setup, *trace.first_step, *trace.step)):
        if isinstance(event, Allocate):
            alive[event.block] = event
            used[event.category] += event.size_bytes
        elif isinstance(event, Free) and event.block in alive:
            freed = alive.pop(event.block)
            used[freed.category] -= freed.size_bytes
        elif number >= first and starts.get(id(event)):
            start = starts[id(event)].popleft()
            if start > latest:
                # "C": a counter, drawn as stacked areas.
                gib = {name: size / GIB for name, size in used.items()}
                yield {
                    "ph": "C",
                    "pid": trace.rank,
                    "ts": start * 1e6,
                    "name": "memory, GiB",
                    "args": gib,
                }
                latest = start


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    # "M": metadata, which gives a process or a thread its name.
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(interval: Interval, pid: int, tid: int) -> dict[str, Any]:
    event, scope = interval.event, interval.event.scope
    details: dict[str, Any] = {"module": scope.module, "action": scope.action}
    if isinstance(event, Launch):
        kernel = event.kernel
        details |= {
            "kind": kernel.kind,
            "shapes": str(kernel.shapes),
            "dtype": kernel.dtype,
            "flops": kernel.flops,
            "bytes": kernel.read_bytes + kernel.write_bytes,
        }
    else:
        details |= {"group": event.group, "bytes": event.size_bytes}
    # "X": a complete event, with begin and duration in microseconds.
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": interval.start * 1e6,
        "dur": (interval.end - interval.start) * 1e6,
        "name": event.kernel.name if isinstance(event, Launch) else event.kind,
        "cat": scope.phase,
        "args": {name: value for name, value in details.items() if value},
    }
