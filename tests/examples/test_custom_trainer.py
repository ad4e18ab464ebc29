"""The example trains, and its TP x FSDP ranks compute what one process computes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.ranks import Pool

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_trainer.py"


def loss_after(tp: int, steps: int) -> float:
    return runpy.run_path(str(EXAMPLE))["train"](tp, steps)


def test_the_example_learns_the_same_on_four_ranks_as_on_one(pool: Pool) -> None:
    (alone,) = pool.run(1, loss_after, 1, 40)
    assert alone < 1.8  # log(12) = 2.5 is where it starts
    assert pool.run(4, loss_after, 2, 40) == [pytest.approx(alone, rel=1e-4)] * 4
