"""Limit of uneven routing: the largest load of a rank of experts before a job runs out of memory.

The busiest rank of a dispatch gets some multiple of the mean number of tokens, and its memory grows
with it, nearly in proportion. A straight line through a multiple that fits and one that does not gives
the next multiple to try. Its allocations lie between theirs, so that its program is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from math import floor
from statistics import fmean
from typing import Any

from titan.config.schema import JobConfig
from titan.sim.record.trace import Allocate
from titan.sim.replay.memory import MemoryReport, memory_report
from titan.sim.routing import config_loads, most_imbalance
from titan.sim.simulate import GIB, Simulation, simulate

_TRIES = 4
_STEPS = 10  # of the answer within one: tenths of the mean load


def simulate_with_limit(config: JobConfig, **options: Any) -> Simulation:
    """Simulate a job, and set `fits_up_to` if ranks share its experts and it fits.

    Args:
        config: The job.
        options: Options of `simulate`.
    """
    simulation = simulate(config, **options)
    if config.parallelism.expert_parallel_degree == 1:
        return simulation

    def at(imbalance: float) -> Simulation:
        return simulate(with_imbalance(config, imbalance), **options)

    if simulation.fits:
        simulation.fits_up_to = _largest_that_fits(simulation, at)
    loads = config_loads(simulation.config, simulation.model, simulation.layout)
    if loads:
        simulation.routed = _routed(simulation, loads, at)
    return simulation


def _routed(
    simulation: Simulation, loads: Sequence[float], at: Callable[[float], Simulation]
) -> dict[str, float]:
    """Return the spread of the steps' time and load, and the memory of the step that exceeds 99 of 100.

    Time and memory grow nearly in proportion with the load, so that they are on lines through three simulations: even routing, the
    mean load and the 99th percentile.
    """
    ordered = sorted(loads)
    high = ordered[int(0.99 * len(ordered))]
    points = {
        1.0: at(1.0),
        simulation.busiest_rank: simulation,
        round(high, 2): at(round(high, 2)),
    }
    curve = tuple((load, points[load].timeline.step_s) for load in sorted(points))
    seconds = [on_line(curve, load) for load in ordered]
    return {
        "load_mean": fmean(ordered),
        "load_p99": high,
        "step_s_p50": seconds[len(seconds) // 2],
        "step_s_p99": on_line(curve, high),
        "step_s_mean": fmean(seconds),
        "step_s_even": curve[0][1],
        "needed_gib_p99": points[round(high, 2)].fullest.needed_bytes / GIB,
        "fits_p99": points[round(high, 2)].fits,
    }


def on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at `x` on straight lines through points, and beyond the ends that of the nearest."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * max(0.0, x - x0) / (x1 - x0)
    return points[-1][1]


def with_imbalance(config: JobConfig, imbalance: float) -> JobConfig:
    """Return the job with another assumed imbalance."""
    return config.model_copy(
        update={
            "simulator": config.simulator.model_copy(update={"expert_imbalance": imbalance})
        }
    )


def _largest_that_fits(simulation: Simulation, at: Callable[[float], Simulation]) -> float:
    """Return the largest imbalance with which the job fits."""
    fitting = simulation.busiest_rank
    most = too_much = most_imbalance(simulation.config, simulation.model)
    if most <= fitting or (worst := at(most)).fits:
        return max(fitting, most)
    missing = {
        fitting: _missing_bytes(simulation.memory.values()),
        most: _missing_bytes(worst.memory.values()),
    }
    for _ in range(_TRIES):
        share = missing[fitting] / (missing[fitting] - missing[too_much])
        guess = floor(_STEPS * (fitting + share * (too_much - fitting))) / _STEPS
        # Reserved memory grows in steps of whole segments, so equals may follow.
        guess = max(guess, round(fitting + 1 / _STEPS, 1))
        if guess >= too_much:
            break
        share = (guess - simulation.busiest_rank) / (most - simulation.busiest_rank)
        reports = _between(simulation, worst, share) or [*at(guess).memory.values()]
        missing[guess] = _missing_bytes(reports)
        fits = all(report.fits for report in reports)
        fitting, too_much = (guess, too_much) if fits else (fitting, guess)
    return fitting


def _between(low: Simulation, high: Simulation, share: float) -> list[MemoryReport]:
    """Return the memory of ranks whose experts get a load between two others; nothing if those do not allocate alike."""
    reports = []
    for rank, trace in low.traces.items():
        pairs = [*zip_longest(trace.step, high.traces[rank].step)]
        if any(type(a) is not type(b) for a, b in pairs):
            return []
        step = [
            replace(a, size_bytes=round(a.size_bytes + share * (b.size_bytes - a.size_bytes)))
            if isinstance(a, Allocate)
            else a
            for a, b in pairs
        ]
        expandable = low.config.training.expandable_segments
        reports.append(
            memory_report(replace(trace, step=step), low.profile, expandable=expandable)
        )
    return reports


def _missing_bytes(reports: Iterable[MemoryReport]) -> int:
    """Return the memory that the fullest rank lacks; negative if it has some to spare."""
    return max(report.needed_bytes - report.usable_bytes for report in reports)
