"""Statistics of `titan compare`: how much two recipes differ in loss, and how many tokens that is worth. Pure functions of curves.

A curve has a run's tokens and its losses. Runs of both recipes are paired by seed: they saw the same samples, so most of the noise
cancels in their difference. Losses of neighbouring steps are correlated, and a seed moves a whole run. So a run counts as one number,
its mean over the last quarter of the tokens, and the interval is Student's over the pairs: three seeds have two degrees of freedom.

A gap in nats becomes tokens by the slope of the loss over the logarithm of the tokens. Example: where a run loses 0.13 nats for each
factor of e in tokens, a gap of 0.004 nats is worth exp(0.004 / 0.13), 3.1% more tokens. With a decaying learning rate the losses of runs of
several lengths have another slope: 1.5 to 2.5 times that of a curve in the known pairs (docs/log.md), and any fraction of
it if the rate falls at the end alone.
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
LEVEL = 0.9  # of intervals
LAST = 0.75  # share of the tokens after which losses count
FAR = math.log(10)  # of a factor in tokens; one that is farther from 1 is not told
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


def final(curve: Curve, begin: float | None = None) -> float:
    """Return the mean loss after some tokens, by default of the last quarter. Each loss is the mean since the one before."""
    begin = LAST * curve[0][-1] if begin is None else begin
    total, before = 0.0, 0.0
    for tokens, loss in zip(*curve, strict=True):
        total += loss * max(0.0, tokens - max(begin, before))
        before = tokens
    return total / (before - begin)


def finals(a: Curve, b: Curve) -> list[float]:
    """Return the final losses of two runs, from a row on that both have: they may be logged at other steps."""
    tokens, _ = in_common(a, b)[0]
    begin = max((n for n in tokens if n <= LAST * tokens[-1]), default=None)
    return [final(curve, begin) for curve in (a, b)]


def in_common(a: Curve, b: Curve) -> list[Curve]:
    """Return the parts of two curves at the tokens that both have. Validations at other tokens do not compare."""
    losses = [dict(zip(*curve, strict=True)) for curve in (a, b)]
    tokens = sorted(losses[0].keys() & losses[1].keys())
    return [(tokens, [each[n] for n in tokens]) for each in losses]


def slope_of(curves: Sequence[Curve]) -> Estimate:
    """Return by how much the loss of runs falls soon after their end, for a factor of e in tokens, from their second half.

    Curves get flatter, and a recipe that needs more tokens reaches the loss after the end. There, a share from `_FLATTER` to 1 of the slope
    is taken to be left.

    Raises:
        InputError: A run has fewer than two losses there.
    """
    found = []
    for curve in curves:
        begin = bisect_right(curve[0], 0.5 * curve[0][-1])
        tokens, losses = curve[0][begin:], curve[1][begin:]
        if len(tokens) < 2:
            raise InputError(
                "a run has fewer than two losses in its second half: log more often"
            )
        found.append(-linear_regression([*map(math.log, tokens)], losses).slope)
    value, low, high = mean_of(found)
    return Estimate(value * (1 + _FLATTER) / 2, low * _FLATTER, high)


def price(gap: Estimate, nats: Estimate, *, decays: bool = False) -> Estimate:
    """Return the logarithm of the factor in tokens that makes up for a gap in loss.

    Args:
        gap: the gap.
        nats: slope of the loss.
        decays: the learning rate decays, so that the slope may be three times as large, or any fraction of it. The gap does not hold zero.

    Raises:
        InputError: The loss may not fall at all.
    """
    if nats.low <= 0:
        raise InputError("losses do not clearly fall in the second half: train longer")
    slopes = (*nats, 3 * nats.high, 1e-9) if decays else nats
    ends = [end / slope for slope in slopes for end in gap[1:]]
    # So far from the end of the runs, the slope is not known.
    low, high = (
        math.copysign(math.inf, end) if abs(end) > FAR else end
        for end in (min(ends), max(ends))
    )
    return Estimate(gap.value / nats.value, low, high)
