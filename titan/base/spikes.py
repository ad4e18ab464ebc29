"""Robust z-score: how far a number is off the numbers before it.

The score is the distance from their median, in units of their median absolute deviation times 1.4826. For normal numbers
this unit is the standard deviation, and a few outliers do not move it (Iglewicz and Hoaglin, "How to Detect and Handle
Outliers", 1993).
"""

from __future__ import annotations

from collections import deque
from statistics import median

# 1 / 0.6745; 0.6745 is the third quartile of the standard normal distribution.
_MAD_TO_SIGMA = 1.4826
# Share of the median: if the loss hardly moves, small changes are no spikes.
_LEAST_SIGMA = 0.01


def spike_score(loss: float, before: deque[float]) -> float:
    """Return the robust z-score of a loss.

    Args:
        loss: loss of a step.
        before: losses of the steps before it.

    Returns:
        The score, below zero if the loss is below the median.
    """
    middle = median(before)
    sigma = _MAD_TO_SIGMA * median(abs(x - middle) for x in before)
    # Never 0: equal losses have no deviation.
    return (loss - middle) / max(sigma, _LEAST_SIGMA * abs(middle), 1e-12)
