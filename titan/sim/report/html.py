"""A simulation as a self-contained page: four figures, the timeline of every rank, memory over the step, and tables.

page.html's script draws all of it from the data in the page. Intervals too short to be seen
are joined with their neighbours of the same colour, so that a page stays a few megabytes at any
size of job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from titan.sim.record.trace import CATEGORIES, Launch, Transfer
from titan.sim.replay.memory import tensors_behind
from titan.sim.replay.timeline import Interval, lane_labels
from titan.sim.simulate import GIB, Facts, StepSimulation

from .text import (
    page,
    price_rows,
    speed_range,
    time_rows,
)

_PIXELS = 6000  # parts of a step: a shorter interval is joined with the next


def write_page(simulation: StepSimulation, facts: Facts, path: Path) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
    """
    data = {
        "title": f"{facts['model']} on {facts['world_size']} x {facts['hardware']}",
        "speed": speed_range(facts, ""),
        "time": time_rows(facts),
        "prices": price_rows(facts["interval"]),
        "text": page(facts),
        "facts": facts,
        "ranks": [_rank(simulation, rank) for rank in simulation.traces],
        "categories": CATEGORIES,
    }
    template = (files("titan.sim.report") / "page.html").read_text(encoding="utf-8")
    text = json.dumps(data).replace("</", "<\\/")  # whatever a name holds, it ends no script
    path.write_text(template.replace("/*DATA*/null", text), encoding="utf-8")


def _rank(simulation: StepSimulation, rank: int) -> dict[str, Any]:
    """Return the data of one rank."""
    timeline, memory = simulation.timeline.ranks[rank], simulation.memory[rank]
    lanes: dict[str, list[Interval]] = {}
    issued = (Interval("host", *span) for span in timeline.host)
    for interval in (*issued, *timeline.intervals):
        if isinstance(interval.event, Launch | Transfer):  # else the host waits
            lanes.setdefault(interval.lane, []).append(interval)
    labels = lane_labels(timeline.intervals, simulation.traces[rank].groups)
    # Milliseconds for which one pixel stands.
    least = simulation.timeline.step_s * 1e3 / _PIXELS
    behind = tensors_behind(simulation.traces[rank], simulation.profile, memory.timeline)
    return {
        "rank": rank,
        "lanes": [
            [labels.get(name, name), _joined(lane, least)] for name, lane in lanes.items()
        ],
        "memory": [
            [
                p.position,
                p.phase,
                [round(p.by_category[c] / GIB, 4) for c in CATEGORIES],
                [f"{size / GIB:.2f} GiB: {count} x {name}" for name, count, size in tensors],
            ]
            for p, tensors in zip(memory.timeline, behind, strict=True)
        ],
        "reserved_gib": memory.peak_reserved_bytes / GIB,
    }


def _joined(lane: Sequence[Interval], least: float) -> list[list[Any]]:
    """Return the visible bars of a lane as [start, end, class, text]. Times are milliseconds."""
    bars: list[list[Any]] = []
    for interval in sorted(lane, key=lambda i: i.start):
        event, scope = interval.event, interval.event.scope
        kind = scope.phase if isinstance(event, Launch) else "transfer"
        start, end = round(interval.start * 1e3, 4), round(interval.end * 1e3, 4)
        last = bars[-1] if bars else None
        # Joined only with a bar of the same colour that it touches, as far as the eye can tell.
        if last and last[2] == kind and max(end - start, start - last[1]) < least:
            last[1], last[3] = end, last[3].split(" and ")[0] + " and others"
            continue
        what = (
            event.kernel.name
            if isinstance(event, Launch)
            else f"{event.kind} over {interval.lane}"
        )
        bars.append(
            [start, end, kind, " ".join(filter(None, (what, scope.action, scope.module)))]
        )
    return bars
