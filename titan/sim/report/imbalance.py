"""Limit of uneven routing: the largest load of a rank of experts before a job runs out of memory.

The busiest rank of a dispatch gets some multiple of the mean number of tokens, and its memory grows
with it. The allocations under a multiple lie between those of two others, so that the program of
two is recorded and the others are computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor
from statistics import fmean
from typing import Any

from titan.config.schema import JobConfig
from titan.sim.record.trace import Allocate
from titan.sim.replay.memory import MemoryReport, memory_report
from titan.sim.routing import config_loads, most_imbalance
from titan.sim.section import assumptions
from titan.sim.simulate import GIB, Simulation, simulate


def simulate_with_limit(config: JobConfig, **options: Any) -> Simulation:
    """Simulate a job, and set `fits_up_to` if ranks share its experts and it fits.

    Args:
        config: the job.
        options: options of `simulate`.
    """
    simulation = simulate(config, **options)
    if config.parallelism.expert_parallel_degree == 1:
        return simulation

    def at(imbalance: float) -> Simulation:
        return simulate(with_imbalance(config, imbalance), **options)

    if simulation.fits:
        simulation.fits_up_to = _largest_that_fits(simulation, at)
    if loads := config_loads(simulation.config, simulation.model, simulation.layout):
        simulation.routed = _routed(simulation, loads, at)
    return simulation


def _routed(
    simulation: Simulation, loads: Sequence[float], at: Callable[[float], Simulation]
) -> dict[str, float]:
    """Return the spread of the steps' time and load, and the memory of the step that exceeds 99 of 100.

    Time and memory grow nearly in proportion with the load, so that they are on lines through three
    simulations: even routing, the mean load and the 99th percentile.
    """
    import numpy as np  # most pages need none

    ordered, own = sorted(loads), simulation.busiest_rank
    place = int(0.99 * len(ordered))
    high = round(ordered[place], 2)
    points = {
        load: simulation if load == own else at(load) for load in sorted({1.0, own, high})
    }
    step_s = [point.timeline.step_s for point in points.values()]
    seconds = np.interp(ordered, [*points], step_s).tolist()
    return {
        "load_mean": fmean(ordered),
        "load_p99": ordered[place],
        "step_s_p50": seconds[len(seconds) // 2],
        "step_s_p99": seconds[place],
        "step_s_mean": fmean(seconds),
        "step_s_even": step_s[0],
        "needed_gib_p99": points[high].fullest.needed_bytes / GIB,
        "fits_p99": points[high].fits,
    }


def with_imbalance(config: JobConfig, imbalance: float) -> JobConfig:
    """Return the job with another assumed imbalance."""
    return config.model_copy(
        update={
            "simulator": assumptions(config).model_copy(update={"expert_imbalance": imbalance})
        }
    )


def _largest_that_fits(simulation: Simulation, at: Callable[[float], Simulation]) -> float:
    """Return the largest imbalance with which the job fits."""
    own, most = simulation.busiest_rank, most_imbalance(simulation.config, simulation.model)
    if most <= own or (worst := at(most)).fits:
        return max(own, most)

    def is_too_much(load: float) -> bool:
        share = (load - own) / (most - own)
        return not all(report.fits for report in _between(simulation, worst, share))

    tenths = range(floor(10 * own) + 1, ceil(10 * most))
    loads = [own, *(tenth / 10 for tenth in tenths)]
    return loads[bisect_left(loads, True, lo=1, key=is_too_much) - 1]


def _between(low: Simulation, high: Simulation, share: float) -> list[MemoryReport]:
    """Return the memory of ranks whose experts get a load between two others.

    A compiler may order work by its sizes. Where the two do not allocate alike, the memory is on a line between theirs, which leaves
    out how the allocator rounds.
    """
    reports = []
    for rank, trace in low.traces.items():
        other = high.traces[rank].step
        if [*map(type, trace.step)] != [*map(type, other)]:
            ends = (each.memory[rank].peak_reserved_bytes for each in (low, high))
            reserved = _on_line(*ends, share=share)
            reports.append(replace(low.memory[rank], peak_reserved_bytes=reserved))
            continue
        step = [
            replace(a, size_bytes=_on_line(a.size_bytes, b.size_bytes, share=share))
            if isinstance(a, Allocate) and isinstance(b, Allocate)
            else a
            for a, b in zip(trace.step, other, strict=True)
        ]
        expandable = low.config.training.expandable_segments
        reports.append(
            memory_report(replace(trace, step=step), low.profile, expandable=expandable)
        )
    return reports


def _on_line(low: int, high: int, *, share: float) -> int:
    return round(low + share * (high - low))
