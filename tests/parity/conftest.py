"""Collects what the parity tests measure, and writes docs/parity.md when all rows of a table were run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
_HEAD = f"""# Parity: every layout computes the same numbers

Written by the test run (`pytest tests/parity`, torch {torch.__version__.split("+")[0]}, CPU, gloo, fp32). Each row trains the debug
model for ten AdamW steps on the same global batches, some of whose tokens are masked so that ranks hold different numbers
of valid ones, and is compared with one process without accumulation. Differences are relative, the largest over all steps
(loss, gradient norm) or all parameters (||a - b|| / ||b||), rounded up to one digit. The tests fail above the bound.

"""


class ParityTable:
    """Rows of one table; `rows` counts those expected."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.expected = 0

    def add(
        self,
        name: str,
        *,
        ranks: int,
        accumulation: int,
        differences: dict[str, float],
        bound: float,
    ) -> None:
        cells = [
            name,
            str(ranks),
            str(accumulation),
            *map(_rounded_up, differences.values()),
            f"{bound:.0e}",
        ]
        self.rows[name + str(accumulation)] = "| " + " | ".join(cells) + " |"

    def write(self) -> None:
        columns = "| layout | ranks | accumulation | loss | gradient norm | gradients (step 1) | weights after 10 steps | bound |"
        rule = "|---|---|---|---|---|---|---|---|"
        PAGE.write_text(_HEAD + "\n".join([columns, rule, *self.rows.values()]) + "\n")


def _rounded_up(value: float) -> str:
    if value == 0:
        return "0"
    scale = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / scale) * scale:.0e}"


@pytest.fixture(scope="session")
def parity_table() -> Iterator[ParityTable]:
    table = ParityTable()
    yield table
    if table.expected and len(table.rows) == table.expected:
        table.write()
