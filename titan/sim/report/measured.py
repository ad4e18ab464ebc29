"""Simulated and measured step of a run (`titan sim JOB --measured RUN`): time by kind of work, and memory.

The step time and the memory come from the run's metrics.jsonl, and the kinds of work from its last
profiler trace, if it has one. An entry point of the group `titan.extensions`, measured.NAME, reads
it. The simulated kernels are sorted in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Protocol

from titan.base.run_folder import RunFolder
from titan.config.plug_ins import door, parts_of
from titan.observe.step_parts import COMMUNICATION, HOST, PARTS
from titan.sim.record.trace import KernelKind, Launch
from titan.sim.simulate import GIB, Facts, Simulation

_PART: dict[KernelKind, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "attention_backward": "attention",
    "recurrence": "attention",
    "copy": "copies",
    "host_copy": "copies",
}
"""Part of a step that a kind of kernel counts to. All others are elementwise."""


@door("measured")
class MeasuredParts(Protocol):
    """Function that returns a rank of a run and the seconds of each of its PARTS, or None without a trace."""

    def __call__(self, run: Path, /) -> tuple[int, dict[str, float]] | None: ...


def compare(simulation: Simulation, run: Path) -> list[Facts]:
    """Compare a simulation with a run.

    Args:
        simulation: the simulated job.
        run: folder of a run of the job.

    Returns:
        Rows of `name`, `unit`, `predicted` and `measured`, for the run's later steps and its rank
            0.
    """
    ranks, logged = [*simulation.traces], RunFolder(run).rows()
    later = [row for row in logged[len(logged) // 2 :] if row.get("step_s")]
    step_s = median(row["step_s"] for row in later) if later else 0.0
    rows = [("step", "s", simulation.timeline.step_s, step_s)]
    for measured_parts in parts_of(MeasuredParts):
        if (found := measured_parts(run)) is None:
            continue
        rank, parts_s = found
        # Ranks are numbered stage by stage, and one of each stage is simulated.
        stage = rank * len(ranks) // simulation.layout.world_size
        predicted_s = _parts_s(simulation, ranks[stage])
        rows += [(PARTS[part], "s", predicted_s[part], parts_s[part]) for part in PARTS]
    memory = simulation.memory[ranks[0]]
    for key, name, size in (
        ("memory_gib", "reserved", memory.peak_reserved_bytes),
        ("memory_active_gib", "active", memory.peak_active_bytes),
    ):
        # On a CPU the rows count the process, which is not simulated.
        if gib := [row[key] for row in later if row.get("memory_kind") == "device"]:
            rows.append((f"memory, {name}", "GiB", size / GIB, max(gib)))
    return [
        dict(zip(("name", "unit", "predicted", "measured"), row, strict=True)) for row in rows
    ]


def _parts_s(simulation: Simulation, rank: int) -> dict[str, float]:
    """Return the seconds of each of PARTS. They add up to the step."""
    timeline = simulation.timeline.ranks[rank]
    parts_s = defaultdict[str, float](float)
    for lane, start, end, event in timeline.intervals:
        if lane == "compute" and isinstance(event, Launch):
            kind, name = event.kernel.kind, event.kernel.name
            # A change of dtype is a copy to torch.
            part = "elementwise" if name == "aten::_to_copy" else _PART.get(kind, "elementwise")
            parts_s["optimizer" if event.scope.phase == "optimizer" else part] += end - start
    parts_s[COMMUNICATION] = sum(timeline.exposed_s.values())
    parts_s["copies"] += timeline.copies_s
    parts_s[HOST] = timeline.host_s + timeline.peers_s
    return parts_s
