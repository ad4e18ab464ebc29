"""Schedules that split the backward pass, with compiled and recomputed blocks, against one process: loss, norm, each gradient and weight."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import BOUND, Layout, fsdp, largest, pp, schedule, tp, train
from tests.support.ranks import Pool
from titan.numerics.certify.steps import WHAT

STEPS = 3
# Gradients of weights wait for one microbatch and more.
CSV = """0F0,0F1,0I0,0F2,0I1,0F3,0W0,0I2,0I3,0W1,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
"""
SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "csv")
COMPILERS = ("", "aot_eager", "inductor")
RECOMPUTED = ("none", "selective", "full", "memory_budget")
AXES = {"FSDP2": fsdp(2), "TP": tp(2), "EP": fsdp(2)}


def rows() -> list[Layout]:
    found = []
    for name, compiled, recompute, axis in itertools.product(SCHEDULES, COMPILERS, RECOMPUTED, AXES):
        if recompute == "memory_budget" and not compiled:
            continue
        settings: tuple[tuple[str, Any], ...] = schedule(name)
        model = ("llama3", "tiny")
        if axis == "EP":
            settings, model = (*settings, ("expert_parallel_degree", 2)), ("qwen3", "tiny_moe")
        found.append(
            Layout(f"{name}, {compiled or 'eager'}, {recompute}, {axis}", (*pp(2), *AXES[axis]), settings=settings, compiled=compiled, recompute=recompute, model=model)
        )
    return found


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    known: dict[Any, Any] = {}

    def get(model: tuple[str, str]) -> Any:
        if model not in known:
            known[model] = pool.run(1, train, Layout("one process", model=model), "float32", STEPS)[0]
        return known[model]

    return get


@pytest.mark.parametrize("layout", rows(), ids=lambda layout: layout.name)
def test_equals_one_process(layout: Layout, pool: Pool, alone: Any, tmp_path: Path) -> None:
    if layout.name.startswith("csv"):
        file = tmp_path / "mine.csv"
        file.write_text(CSV)
        rows = 2 if "TP" in layout.name else 1
        settings = (("pipeline_parallel_schedule_csv", str(file)), ("pipeline_parallel_microbatch_size", rows))
        layout = replace(layout, settings=layout.settings[1:] + settings)
    expected = alone(layout.model)
    results = pool.run(layout.ranks, train, layout, "float32", STEPS)
    found = {what: largest(results, expected, what) for what in WHAT}
    assert all(value < BOUND for value in found.values()), found
