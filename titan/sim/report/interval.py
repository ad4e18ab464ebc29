"""Best interval between checkpoints, and the time that a run takes under failures.

Failures come at random (exponential times between them, mean M for the job), and hit restarts, too.
Work is done in intervals: tau seconds of training, delta seconds in which training stands still for
a save, and w seconds in which the save is written beside training and does not count yet. A failure
costs a restart of R seconds, and all work since the last save that counts. The expected time from
one save to the next is then exactly

    C = M exp((R + w) / M) (exp((tau + delta) / M) - 1)

With w = 0 it is the complete model of Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps" (FGCS 2006). If saves are written beside training, the first save after
a failure needs tau + delta + w without another failure, and each later save needs tau + delta. The
sum over both cases is the factor exp(w / M). Goodput is tau over C. The best tau is about sqrt(2
delta M) (Young, "A first order approximation to the optimum checkpoint interval", CACM 1974), and
more exactly Daly's higher order. `titan sim --run` shows all this for a job. Imports no torch.
"""

from __future__ import annotations

from math import ceil, exp, expm1, sqrt
from statistics import NormalDist

_MOST = 200.0  # largest exponent; a run that takes e^200 times as long never ends
_MANY = 500.0  # mean number of absent nodes above which a normal distribution is as good


def expected_interval_s(
    work_s: float,
    *,
    mtbf_s: float,
    save_s: float = 0.0,
    restart_s: float = 0.0,
    write_s: float = 0.0,
) -> float:
    """Return the expected seconds from one checkpoint to the next.

    Args:
        work_s: seconds of training between two saves (tau).
        mtbf_s: mean time between failures of the job, in seconds (M).
        save_s: seconds for which training stands still (delta).
        restart_s: seconds from a failure until training goes on (R).
        write_s: seconds after `save_s` in which the checkpoint does not count yet (w).
    """
    lost, needed = (restart_s + write_s) / mtbf_s, (work_s + save_s) / mtbf_s
    return mtbf_s * exp(min(lost, _MOST)) * expm1(min(needed, _MOST))


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Young's first-order best seconds of training between saves."""
    return sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order best seconds of training between saves."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = sqrt(save_s / (2 * mtbf_s))
    return young_interval_s(save_s, mtbf_s) * (1 + x / 3 + x * x / 9) - save_s


def num_spares(mean: float, *, probability: float) -> int:
    """Return the number of spare nodes that is enough with a given probability.

    Failures come at random and repairs do not wait for each other. So the number of absent nodes
    has a Poisson distribution, whatever the distribution of a repair's time (Palm's theorem).

    Args:
        mean: mean number of absent nodes.
        probability: probability that the spare nodes are enough.
    """
    if mean > _MANY:  # exp(-mean) would soon be 0
        return ceil(NormalDist(mean, sqrt(mean)).inv_cdf(probability))
    count, term = 0, exp(-mean)
    total = term
    while total < probability and term > 0:
        count += 1
        term *= mean / count
        total += term
    return count
