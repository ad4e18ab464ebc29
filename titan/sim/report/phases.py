"""Phases of a job (titan/config/phases.py), each simulated, with the cost of each and of the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from titan.config.phases import Phase, phases_of
from titan.config.schema import JobConfig
from titan.sim.simulate import Facts, Simulation, facts

from .imbalance import simulate_with_limit
from .intervals import of_speed
from .text import columns, duration, utilization

_FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "mfu_dtype", "fits", "tight")


def simulate_phases(
    config: JobConfig, *, world_size: int, **how: Any
) -> list[tuple[Phase, Simulation]]:
    """Simulate a step of each phase of a job.

    Args:
        config: the job.
        world_size: number of ranks.
        how: other options of `simulate`.
    """
    return [
        (phase, simulate_with_limit(phase.config, world_size=world_size, **how))
        for phase in phases_of(config, world_size=world_size)
    ]


def phase_rows(parts: Sequence[tuple[Phase, Simulation]]) -> list[Facts]:
    """Return each phase's settings and cost as data. docs/simulator.md defines every field."""
    rows = []
    for phase, simulation in parts:
        found = facts(simulation)
        rows.append(
            {name: found[name] for name in _FIGURES}
            | {
                "first_step": phase.first_step,
                "steps": phase.steps,
                "tokens": phase.tokens,
                "sequences_per_step": phase.sequences,
                "seq_len": phase.config.training.seq_len,
                "mesh": phase.mesh,
                "seconds": phase.steps * found["step_time_s"],
                "needed_gib": found["memory"]["needed_gib"],
            }
        )
    return rows


def phase_lines(rows: Sequence[Facts]) -> Iterator[str]:
    """Yield a table of phases and of the whole run; nothing for a single phase."""
    if len(rows) < 2:
        return
    head = [
        "phase",
        "steps",
        "sequences",
        "tokens",
        "step",
        "tokens/s/GPU",
        "MFU",
        "GiB",
        "time",
        "",
    ]
    table = [head]
    for number, row in enumerate(rows, 1):
        sizes = [row["steps"], row["sequences_per_step"], row["seq_len"]]
        speed = [duration(row["step_time_s"]), f"{row['tokens_per_s_per_gpu']:,.0f}"]
        cost = [utilization(row), f"{row['needed_gib']:.1f}", duration(row["seconds"])]
        note = "" if row["fits"] else "tight" if row["tight"] else "DOES NOT FIT"
        table.append([str(number), *(f"{size:,}" for size in sizes), *speed, *cost, note])
    steps, seconds = (sum(row[name] for row in rows) for name in ("steps", "seconds"))
    most = f"{max(row['needed_gib'] for row in rows):.1f}"
    table.append(["all", f"{steps:,}", *[""] * 5, most, duration(seconds), ""])
    yield from ("", *(f"  {line}" for line in columns(table, left=(0, 9))))
    if len({row["mesh"] for row in rows}) > 1:
        yield from (f"  phase {n}: {row['mesh']}" for n, row in enumerate(rows, 1))
    yield "  the rest of this page is about phase 1"


def combine_phases(parts: Sequence[tuple[Phase, Facts]]) -> Facts:
    """Return the facts of phases as facts of a single step, to rank ways to run a job.

    The memory comes from the phase that needs most, the speed from the whole run.
    """
    _, worst = max(parts, key=lambda part: part[1]["memory"]["needed_gib"])
    if len(parts) == 1:
        return worst
    steps = sum(phase.steps for phase, _ in parts)
    seconds = sum(phase.steps * found["step_time_s"] for phase, found in parts)
    tokens = sum(phase.tokens for phase, _ in parts)
    tflops = sum(p.steps * f["step_time_s"] * f["tflops_per_gpu"] for p, f in parts) / seconds
    change = tflops / worst["tflops_per_gpu"]
    runs = all(found["fits"] or found["tight"] for _, found in parts)
    fits = all(found["fits"] for _, found in parts)
    speed, interval = tokens / seconds / worst["world_size"], worst["interval"]
    return worst | {
        "step_time_s": seconds / steps,
        "tokens_per_step": tokens / steps,
        "tokens_per_s_per_gpu": speed,
        "interval": interval | of_speed(speed, interval["shares"])._asdict(),
        "tflops_per_gpu": tflops,
        **{name: worst[name] and worst[name] * change for name in ("mfu", "mfu_causal")},
        "fits": fits,
        "tight": runs and not fits,
    }
