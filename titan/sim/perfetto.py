"""Write a simulated step as a trace for https://ui.perfetto.dev or chrome://tracing: a process for each rank, a lane for each stream.

The format is that of the Trace Event document (Google, 2016), which torch.profiler writes too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .simulate import Simulation
from .timeline import Interval
from .trace import Launch


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write one step of all traced ranks. Raises OSError."""
    events: list[dict[str, Any]] = []
    for rank, timeline in simulation.timeline.ranks.items():
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        lanes: dict[str, int] = {}
        for interval in timeline.intervals:
            lane = interval.lane
            if not isinstance(interval.event, Launch) and interval.event.kind in ("send", "recv"):
                lane += f", {interval.event.kind}"  # both at once
            if lane not in lanes:
                lanes[lane] = len(lanes)
                events.append(_name("thread_name", rank, lanes[lane], lane))
            events.append(_event(interval, rank, lanes[lane]))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


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
