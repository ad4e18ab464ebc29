"""Collect what the parity tests measure; write build/parity/TABLE.csv when every row of a table ran.

`python -m tests.support.parity_page` renews the rows in the tree and docs/parity.md with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import parity_page
from tests.support.layouts import Layout, num_steps, train
from tests.support.parity_page import Row
from tests.support.ranks import Pool


class ParityTable:
    """The rows of one table, written to build/ when all expected ones ran."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[Row] = []
        self.expected = 0

    def add(
        self,
        name: str,
        *,
        mesh: str,
        accumulation: int,
        differences: dict[str, float],
        bound: float,
    ) -> None:
        loss, norm, gradients, weights = map(_rounded_up, differences.values())
        row = Row(
            *(self.name, name, mesh, str(accumulation)),
            *(loss, norm, gradients, weights, f"{bound:.0e}"),
        )
        assert row not in self.rows, f"two rows alike: {row}"
        self.rows.append(row)

    def write(self) -> None:
        if self.expected and len(self.rows) == self.expected and num_steps() == 10:
            parity_page.write(parity_page.BUILD / f"{self.name}.csv", self.rows)


def _rounded_up(value: float) -> str:
    if value == 0:
        return "0"
    scale = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / scale) * scale:.0e}"


@pytest.fixture(scope="session")
def parity_table() -> Iterator[ParityTable]:
    table = ParityTable("dense")
    yield table
    table.write()


@pytest.fixture(scope="session")
def composition_table() -> Iterator[ParityTable]:
    table = ParityTable("composed")
    yield table
    table.write()


@pytest.fixture(scope="session")
def moe_table() -> Iterator[ParityTable]:
    table = ParityTable("experts")
    yield table
    table.write()


class References:
    """Run a layout's settings on one process, once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.runs: dict[tuple[Layout, int], dict[str, Any]] = {}

    def run(self, *, steps: int = 0, **settings: Any) -> dict[str, Any]:
        layout = Layout("one process", **settings)
        if (layout, steps) not in self.runs:
            self.runs[layout, steps] = self.pool.run(1, train, layout, "float32", steps)[0]
        return self.runs[layout, steps]


@pytest.fixture(scope="session")
def references(pool: Pool) -> References:
    return References(pool)
