"""Measured products, collectives and attention of one card, as tables by shape.

titan ships a small file for each card (hardware/measured, written by scripts/measured_tables.py).
All are bursts of one kernel: they say how the shapes compare, and a profile says which level a card
sustains (`Profile.matmul_share`).

    products      time over that of a roofline, by rows, columns and the length of the sum
    collectives   microseconds by kind, number of ranks and bytes
    attention     TFLOP/s of causal attention by head dimension, number of heads in the batch and length
    recurrence    microseconds of linear attention by kind, number of heads in the batch and length

Between the sizes of a table, values are interpolated by the logarithms; beyond its ends, the
nearest one holds. Imports no torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "hardware" / "measured"
CARDS = sorted(file.stem for file in _FOLDER.glob("*.json"))
"""Cards that have tables."""

SPAN_S = 4e-6
"""Seconds of a launch and of an empty kernel in the roofline that products are compared with."""
LETTERS = "".join(chr(code) for code in range(35, 127) if chr(code) != "\\")
"""Letters of a shipped table: letter n is the ratio exp(STEP * (n - ZERO))."""
STEP, ZERO = 0.03, 36
ALIGNED = 8
"""Products whose rows are no multiple of this number have rows of their own in a table: libraries take slower kernels for them."""
POWER_LAW = 1.01
"""Exponent of the routes on which experts were measured beside even ones."""
BUS = {
    "ring_gb_per_s": ("all_gather", 0),
    "all_reduce_gb_per_s": ("all_reduce", 0),
    "all_to_all_gb_per_s": ("all_to_all", 0),
    "p2p_gb_per_s": ("all_to_all", 2),
}
"""Figures of a profile that a table of collectives has: the kind of collective, and its ranks (0: as many as were measured)."""
_RATIOS = {letter: STEP * (place - ZERO) for place, letter in enumerate(LETTERS)}


class Grid:
    """Positive values on a grid of sizes, interpolated by the logarithms of both.

    Attributes:
        axes: sizes of each axis, increasing.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        """Read a table {"axes": sizes of each axis, "values": of all points, the last axis first}.

        Values are numbers, 0 for a point that was not measured, or a text of `LETTERS`, with
        spaces.
        """
        self.axes: list[list[int]] = table["axes"]
        values = table["values"]
        if isinstance(values, str):
            self.logs = [*map(_RATIOS.get, values)]
        else:
            self.logs = [log(value) if value else None for value in values]

    def at(self, *sizes: float) -> float | None:
        """Return the value at some sizes, or None if no point around them was measured."""
        places = [_places(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = weights = 0.0
        for corner in product(*places):
            weight, index = 1.0, 0
            for axis, (share, place) in zip(self.axes, corner, strict=True):
                weight *= share
                index = index * len(axis) + place
            value = self.logs[index] if weight else None
            if value is not None:
                total, weights = total + weight * value, weights + weight
        return exp(total / weights) if weights else None


def _places(axis: Sequence[int], size: float) -> tuple[tuple[float, int], ...]:
    """Return the places of an axis around a size, with their weights."""
    right = bisect_left(axis, size)
    if right == 0 or right == len(axis):
        return ((1.0, min(right, len(axis) - 1)),)
    low, high = axis[right - 1], axis[right]
    share = log(size / low) / log(high / low)
    return (1 - share, right - 1), (share, right)


class Tables:
    """Measured tables of one card.

    Attributes:
        source: where the figures are from, with version and licence.
        large_share: share of the peak that large products reached in a burst, by dtype.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.source: str = raw["source"]
        self._collectives = _grids(raw["collectives"])
        self._products = {
            dtype: [*map(Grid, parts)] for dtype, parts in raw["products"].items()
        }
        self._attention = Grid(raw["attention"])
        self._recurrence = _grids(raw["recurrence"])
        self._uneven: list[tuple[int, float]] = raw["uneven"]
        self.large_share: dict[str, float] = raw["large_share"]

    def product_ratio(self, dtype: str, rows: int, columns: int, summed: int) -> float | None:
        """Return the time of a product over its roofline's, or None if its dtype was not measured.

        Args:
            dtype: "bfloat16" or "float8".
            rows: rows of the result.
            columns: columns of the result.
            summed: length of the sums.
        """
        grids = self._products.get(dtype)
        if grids is None:
            return None
        aligned, odd = grids
        # Odd rows were measured up to some thousands: beyond them, what one row more costs does not
        # show.
        is_odd = rows % ALIGNED and odd.axes and rows <= odd.axes[0][-1]
        return (odd if is_odd else aligned).at(rows, columns, summed)

    def collective_s(
        self, kind: str, ranks: int, size_bytes: float
    ) -> tuple[float, float] | None:
        """Return latency and volume of a collective within a node in seconds, or None if its kind was not measured.

        Args:
            kind: kind of the transfer, as in a trace.
            ranks: number of ranks. More than were measured have the bandwidth of the most, and
                latency in proportion.
            size_bytes: size of the transfer, as in a trace.
        """
        grid = self._collectives.get(kind)
        if grid is None:
            return None
        most = grid.axes[0][-1]
        sizes, scale = grid.axes[1], 1.0
        # Each rank sends (n - 1) / n of the tensor, so a rate of the wire holds for any number of
        # ranks.
        if ranks > most:
            scale = (1 - 1 / ranks) / (1 - 1 / most)
        known = min(ranks, most)
        least, total = grid.at(known, sizes[0]), grid.at(known, min(size_bytes, sizes[-1]))
        assert least is not None and total is not None
        latency, seconds = least * 1e-6, total * 1e-6
        if size_bytes > sizes[-1]:
            seconds *= size_bytes / sizes[-1]
        latency = min(latency, 0.9 * seconds)
        hops = (ranks - 1) / (known - 1)
        return latency * hops, (seconds - latency) * scale

    def uneven_share(self, rows: float, exponent: float) -> float:
        """Return the rate of grouped products on uneven routes over that on even ones.

        Args:
            rows: mean rows of a group.
            exponent: exponent of the power law of the groups' rows; 0 for even ones.
        """
        if not self._uneven or not exponent:
            return 1.0
        sizes, shares = zip(*self._uneven, strict=True)
        measured = sum(share * shares[place] for share, place in _places(sizes, rows))
        return 1 - (1 - measured) * min(1.0, exponent / POWER_LAW)

    def bus_gb_per_s(self, figure: str) -> float:
        """Return a profile's figure of `BUS`: the bandwidth of the largest collective that was measured."""
        kind, ranks = BUS[figure]
        counts, sizes = self._collectives[kind].axes
        ranks = ranks or counts[-1]
        found = self.collective_s(kind, ranks, sizes[-1])
        assert found is not None
        passes = 2 if kind == "all_reduce" else 1
        return passes * (1 - 1 / ranks) * sizes[-1] / sum(found) / 1e9

    def attention_tflops(self, head_dim: int, heads: int, length: int) -> float:
        """Return the rate of causal attention in the forward pass, in TFLOP/s of the FLOPs that the mask leaves.

        Args:
            head_dim: channels of a head.
            heads: heads of queries over the batch. More than were measured at that length have the
                rate of the most.
            length: tokens of a sequence.
        """
        while (rate := self._attention.at(head_dim, heads, length)) is None:
            heads //= 2  # the table has powers of two
        return rate

    def recurrence_s(self, kind: str, heads: int, length: int) -> float | None:
        """Return the seconds of linear attention in the forward pass, with 128 channels, or None if its kind was not measured.

        Args:
            kind: "gdn" or "kda".
            heads: heads of values over the batch. More than were measured take longer in
                proportion, as does a longer sequence.
            length: tokens of a sequence.
        """
        grid = self._recurrence.get(kind)
        if grid is None:
            return None
        most = [axis[-1] for axis in grid.axes]
        us = grid.at(heads, length)
        assert us is not None
        return us * 1e-6 * max(1.0, heads / most[0]) * max(1.0, length / most[1])


@cache
def tables(card: str) -> Tables:
    """Return the tables of a card in `CARDS`."""
    return Tables(json.loads((_FOLDER / f"{card}.json").read_text("utf-8")))


def _grids(tables: dict[str, Any]) -> dict[str, Grid]:
    return {kind: Grid(table) for kind, table in tables.items()}
