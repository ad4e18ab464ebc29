"""Thirty layouts again with what makes them fast stacked on top; docs/parity.md sums it up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import (
    BOUND,
    GLOBAL_BATCH,
    TRACED,
    Layout,
    differences,
    layouts_of,
    mesh_name,
    train,
)
from titan.numerics.certify.steps import WHAT, bounds

LAYOUTS = layouts_of("composed")


def layouts(*also_default: str) -> list[Any]:
    """Return all of them. Slow are those that repeat others and more than two ranks, except `also_default` on four."""

    def slow(layout: Layout) -> bool:
        return layout.repeats or layout.ranks > (4 if layout.name in also_default else 2)

    return [
        pytest.param(
            layout,
            id=f"{layout.name}-{layout.ranks}x{layout.accumulation}",
            marks=[pytest.mark.slow] if slow(layout) else [],
        )
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize("layout", layouts())
def test_compiled_and_recomputed(layout, references, pool, composition_table) -> None:
    stacked = replace(layout, compiled=TRACED, recompute="selective")
    found = differences(
        pool.run(layout.ranks, train, stacked), references.run(documents=layout.documents)
    )
    assert max(found.values()) < BOUND, found
    add(composition_table, f"{layout.name}, compiled, selective AC", layout, found, BOUND)


@pytest.mark.parametrize("layout", layouts("FSDP2 x TP+SP", "FSDP2 x CP", "PP x FSDP2"))
def test_float8(layout: Layout, references, pool, composition_table) -> None:
    """A tensor's scale is that of what a rank multiplies at once, so the one process takes as few sequences at a time.

    Context-parallel ranks multiply parts of sequences, which no process alone does; a row's scale, rounded to a power of two,
    does not mind.
    """
    degrees = dict(layout.degrees)
    passes = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1) * layout.accumulation
    settings: dict[str, Any] = {
        "float8": "rowwise" if "cp" in degrees else "tensorwise",
        "exact": ("output",),
    }
    if "pp" in degrees:
        passes = GLOBAL_BATCH  # microbatches of one sequence
    if "more ranks" in layout.name:  # titan leaves these alone there, and says so
        settings["exact"] = ("output", "wk", "wv")
    reference = references.run(documents=layout.documents, accumulation=passes, **settings)
    found = differences(pool.run(layout.ranks, train, replace(layout, **settings)), reference)
    limits = bounds(is_8bit=True, adds_in_parts="tp" in degrees or "cp" in degrees)
    assert all(found[what] < limits[what] for what in WHAT), found
    name = f"{layout.name}, float8 {settings['float8']}"
    add(composition_table, name, layout, found, limits["gradients"])


def add(table: Any, name: str, layout: Layout, found: dict[str, float], bound: float) -> None:
    table.expected = 2 * len(LAYOUTS)
    table.add(
        name,
        mesh=mesh_name(layout),
        accumulation=layout.accumulation,
        differences=found,
        bound=bound,
    )
