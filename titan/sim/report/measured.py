"""Simulated and measured step of a run (`titan sim JOB --measured RUN`): time and memory, from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from titan.base.run_folder import RunFolder
from titan.sim.simulate import GIB, Facts, Simulation


def compare(simulation: Simulation, run: Path) -> list[Facts]:
    """Compare a simulation with a run.

    Args:
        simulation: the simulated job.
        run: folder of a run of the job.

    Returns:
        Rows of `name`, `unit`, `predicted` and `measured`, for the run's later steps and its rank
            0.
    """
    logged = RunFolder(run).rows()
    later = [row for row in logged[len(logged) // 2 :] if row.get("step_s")]
    step_s = median(row["step_s"] for row in later) if later else 0.0
    rows = [("step", "s", simulation.timeline.step_s, step_s)]
    memory = simulation.memory[next(iter(simulation.traces))]
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
