"""Limit of uneven routing: the largest load of a rank of experts before a job runs out of memory.

The busiest rank of a dispatch gets some multiple of the mean number of tokens, and its memory grows
with it, nearly in proportion. So a few simulations find the largest multiple that fits: a straight
line through a multiple that fits and one that does not gives the next multiple to try.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import Any

from titan.config.schema import JobConfig
from titan.sim.routing import most_imbalance
from titan.sim.simulate import Simulation, simulate

_TRIES = 4
_STEPS = 10  # of the answer within one: tenths of the mean load


def simulate_with_limit(config: JobConfig, **options: Any) -> Simulation:
    """Simulate a job, and set `fits_up_to` if ranks share its experts and it fits.

    Args:
        config: The job.
        options: Options of `simulate`.
    """
    simulation = simulate(config, **options)
    if config.parallelism.expert_parallel_degree > 1 and simulation.fits:
        simulation.fits_up_to = _largest_that_fits(
            simulation, lambda imbalance: simulate(with_imbalance(config, imbalance), **options)
        )
    return simulation


def with_imbalance(config: JobConfig, imbalance: float) -> JobConfig:
    """Return the job with another assumed imbalance."""
    return config.model_copy(
        update={
            "simulator": config.simulator.model_copy(update={"expert_imbalance": imbalance})
        }
    )


def _largest_that_fits(simulation: Simulation, at: Callable[[float], Simulation]) -> float:
    """Return the largest imbalance with which the job fits."""
    fitting, too_much = (
        simulation.busiest_rank,
        most_imbalance(simulation.config, simulation.model),
    )
    if too_much <= fitting or (worst := at(too_much)).fits:
        return max(fitting, too_much)
    missing = {fitting: _missing_bytes(simulation), too_much: _missing_bytes(worst)}
    for _ in range(_TRIES):
        share = missing[fitting] / (missing[fitting] - missing[too_much])
        guess = floor(_STEPS * (fitting + share * (too_much - fitting))) / _STEPS
        # Reserved memory grows in steps of whole segments, so equals may follow.
        guess = max(guess, round(fitting + 1 / _STEPS, 1))
        if guess >= too_much:
            break
        tried = at(guess)
        missing[guess] = _missing_bytes(tried)
        fitting, too_much = (guess, too_much) if tried.fits else (fitting, guess)
    return fitting


def _missing_bytes(simulation: Simulation) -> int:
    """Return the memory that the fullest rank lacks; negative if it has some to spare."""
    return max(r.needed_bytes - r.usable_bytes for r in simulation.memory.values())
