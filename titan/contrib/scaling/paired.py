"""Statistics of `titan compare`: how much two recipes differ in loss, and how many tokens that is worth. Pure functions of curves.

A curve has a run's tokens and its losses. Runs of both recipes are paired by seed: they saw the same samples, so most of the noise
cancels in their difference. Losses of neighbouring steps are correlated, and a seed moves a whole run. So a run counts as one number,
its mean over the last quarter of the tokens, and the interval is Student's over the pairs: three seeds have two degrees of freedom.

A gap in nats becomes tokens by the slope of the loss over the logarithm of the tokens. Example: where a run loses 0.13 nats for each
factor of e in tokens, a gap of 0.004 nats is worth exp(0.004 / 0.13), 3.1% more tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean, linear_regression, stdev
from typing import NamedTuple

from titan.base.untrusted import InputError

from .results import student

Curve = tuple[list[float], list[float]]
LAST = 0.75  # share of the tokens after which losses count
_FLATTER = 0.75  # as the curves of the known handicaps do (docs/log.md), with a margin


class Estimate(NamedTuple):
    """A value with its interval of 90%."""

    value: float
    low: float
    high: float


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds, with Student's interval."""
    mean = fmean(values)
    width = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - width, mean + width)


def final(curve: Curve) -> float:
    """Return the mean loss of the last quarter."""
    return fmean(_after(LAST, curve)[1])


def slope_of(curves: Sequence[Curve]) -> Estimate:
    """Return by how much the loss of runs falls soon after their end, for a factor of e in tokens, from their second half.

    Curves get flatter, and a recipe that needs more tokens reaches the loss after the end. There, a share from `_FLATTER` to 1 of the slope
    is taken to be left.
    """
    found = []
    for curve in curves:
        tokens, losses = _after(0.5, curve)
        found.append(-linear_regression([*map(math.log, tokens)], losses).slope)
    value, low, high = mean_of(found)
    return Estimate(value * (1 + _FLATTER) / 2, low * _FLATTER, high)


def price(gap: Estimate, nats: Estimate) -> Estimate:
    """Return the logarithm of the factor in tokens that makes up for a gap in loss.

    Args:
        gap: The gap.
        nats: Slope of the loss.

    Raises:
        InputError: The loss may not fall at all.
    """
    if nats.low <= 0:
        message = (
            f"a gap of {gap.value:.4f} ({gap.low:.4f} to {gap.high:.4f}) has no price in tokens"
        )
        raise InputError(
            f"{message}: losses do not clearly fall in the second half; train longer"
        )
    low = min(gap.low / end for end in nats)
    high = max(gap.high / end for end in nats)
    return Estimate(gap.value / nats.value, low, high)


def _after(share: float, curve: Curve) -> Curve:
    """Return the part of a curve after a share of the tokens."""
    begin = bisect_right(curve[0], share * curve[0][-1])
    return curve[0][begin:], curve[1][begin:]
