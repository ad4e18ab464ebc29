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
Axes of the mesh are pipeline (pp), replicas (dp_replicate), FSDP shards (dp_shard), context (cp), tensor (tp); sequences hold two
documents with no attention between them, but for the ring, which has no document mask. Differences are those of fp32 sums taken in
another order; AdamW's eps is 1e-6, since with less it takes the rounding error of a gradient next to zero for a full step.

"""


class ParityTable:
    """Rows of one table; `rows` counts those expected."""

    def __init__(self) -> None:
        self.rows: list[str] = []
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
        cells = [name, mesh, str(accumulation)]
        cells += [*map(_rounded_up, differences.values()), f"{bound:.0e}"]
        row = "| " + " | ".join(cells) + " |"
        assert row not in self.rows, f"two rows alike: {row}"
        self.rows.append(row)

    def write(self) -> None:
        columns = "| layout | mesh | accumulation | loss | gradient norm | gradients (step 1) | weights after 10 steps | bound |"
        PAGE.write_text(_HEAD + "\n".join([columns, "|---" * 8 + "|", *self.rows]) + "\n")


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
