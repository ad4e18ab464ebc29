"""Every three techniques together, in layouts with as many more as titan takes; `python scripts/crossings.py` lists them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.conftest import References
from tests.support.crossings import (
    FACTOR_OF,
    drawn,
    layout_of,
    possible,
    techniques_of,
    triples,
    triples_within,
)
from tests.support.layouts import BOUND, GLOBAL_BATCH, Layout, largest, train
from tests.support.ranks import Pool

NAMES = ("losses", "norms", "gradients", "weights")
LAYOUTS = 101  # the number that `drawn` finds, in 40 s
COMPILED_EXPERTS = 27  # so many of them are experts that are compiled and recomputed
STEPS = 3  # the first update, and steps from weights that it has changed


@pytest.mark.slow
@pytest.mark.parametrize("number", range(LAYOUTS))
def test_equals_one_process(number: int, pool: Pool, references: References) -> None:
    require_equal(drawn()[number], pool, references)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COMPILED_EXPERTS))
def test_windows_and_sinks_equal_one_process(
    number: int, pool: Pool, references: References
) -> None:
    """Compiled and recomputed experts with whatever else, as gpt-oss's."""
    recomputed = ("full", "selective", "2")
    chosen = [row for row in drawn() if row.compiled and row.recompute in recomputed]
    chosen = [row for row in chosen if row.model[0] != "llama3"]
    assert len(chosen) == COMPILED_EXPERTS
    require_equal(replace(chosen[number], model=("gpt_oss", "tiny")), pool, references)


def require_equal(layout: Layout, pool: Pool, references: References) -> None:
    degrees = dict(layout.degrees)
    # A tensor's scale is that of what a rank multiplies at once, see test_composition.py.
    passes = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1) * layout.accumulation
    passes = GLOBAL_BATCH if "pp" in degrees else passes
    same = (
        "documents",
        "batch",
        "blocks",
        "model",
        "overrides",
        "optimizer",
        "float8",
        "freeze",
    )
    reference = references.run(
        steps=STEPS,
        accumulation=passes if layout.float8 else 1,
        **{name: getattr(layout, name) for name in same},
    )
    results = pool.run(layout.ranks, train, layout, "float32", STEPS)
    found = {name: largest(results, reference, name) for name in NAMES}
    if layout.float8:
        # A value in the middle of two of float8's, and a token between two experts, may fall on either side: this row shows
        # that the program runs and trains. test_composition.py and test_float8.py have the numbers.
        assert found["losses"] < 1e-3 and found["norms"] < 5e-2, (layout.name, found)
    else:
        assert max(found.values()) < BOUND, (layout.name, found)


def test_the_layouts_cross_every_triple_that_is_not_refused() -> None:
    assert len(drawn()) == LAYOUTS
    crossed = set().union(*(triples_within(layout.name.split(", ")) for layout in drawn()))
    assert {three for three in triples() if possible(three) is not None} <= crossed


def test_a_layout_has_the_techniques_of_its_name() -> None:
    for technique in FACTOR_OF:
        layout = layout_of([technique])
        assert layout is not None
        others = {"compile"} if technique == "memory budget" else set()
        assert techniques_of(layout) == {technique} | others


def test_masks_are_a_technique() -> None:
    assert techniques_of(Layout("one process")) == {"document masks"}
    assert techniques_of(replace(Layout("one process"), documents=False)) == frozenset()
