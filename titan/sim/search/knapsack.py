"""A knapsack, solved exactly: an option for each of several groups, of the most value within limits.

With the groups in order, and a limit on the sizes of the first n together,

    best[n](u) = max over options (size, value) of group n with size <= u:   best[n - 1](u - size) + value
    best[n](u) = best[n](limit[n])   for u above the group's limit

where u counts units: sizes are rounded up to 1/16384 of the largest limit. Example: groups
{(0, 0), (3, 2.0)} and {(0, 0), (2, 1.5)} with limits 3 and 4. Both second options together need 5,
so that the first group keeps (3, 2.0), and the second (0, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Kept: TypeAlias = "frozenset[str] | None"
"""Results that a block keeps: calls such as "aten.mm@2", or None for everything."""
Option: TypeAlias = tuple[int, float, Kept]
"""Bytes that a block may keep, the seconds that this saves, and the kept results."""
_UNITS = 16384


def fill(groups: Sequence[Sequence[Option]], limits: Sequence[int | None]) -> list[Kept]:
    """Return the chosen results of each group.

    Args:
        groups: the options of each group, by rising size.
        limits: the largest size of all groups up to each, or None without such a limit. The last
            group has one.
    """
    most = max(limit or 0 for limit in limits)
    unit = max(1, -(-most // _UNITS))
    best = np.zeros(_UNITS + 1)
    steps: list[tuple[int, np.ndarray]] = []
    for options, limit in zip(groups, limits, strict=True):
        now, number_at = np.full(_UNITS + 1, -1.0), np.zeros(_UNITS + 1, dtype=int)
        for number, (size, value, _) in enumerate(options):
            units = -(-size // unit)
            if units > _UNITS:
                break
            total = best[: _UNITS + 1 - units] + value
            better = total > now[units:]
            now[units:][better] = total[better]
            number_at[units:][better] = number
        bound = _UNITS if limit is None else max(0, limit // unit)
        now[bound:] = now[bound]
        best = now
        steps.append((bound, number_at))
    chosen: list[Kept] = []
    left = _UNITS
    # Back from the last group: the units that it leaves are those of the groups before it.
    for options, (bound, number_at) in zip(reversed(groups), reversed(steps), strict=True):
        left = min(left, bound)
        size, _, kept = options[number_at[left]]
        chosen.append(kept)
        left -= -(-size // unit)
    return chosen[::-1]
