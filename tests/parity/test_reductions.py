"""How FSDP reduces gradients changes no number: once a step in place of each micro-batch."""

from __future__ import annotations

import pytest

from tests.support.layouts import (
    ALWAYS,
    BOUND,
    NEVER,
    REPLICAS,
    Layout,
    cp,
    differences,
    fsdp,
    train,
)
from tests.support.ranks import Pool

ONCE = (("fsdp_reduce_gradients", "step"),)
LAYOUTS = [
    Layout("FSDP2, ZeRO-2, once", fsdp(2), 4, settings=(*ONCE, *NEVER)),
    Layout("HSDP, ZeRO-3, once", (*REPLICAS, *fsdp(2)), 2, settings=(*ONCE, *ALWAYS)),
    Layout("FSDP2 x CP, once", (*fsdp(2), *cp(2)), 4, settings=ONCE, repeats=True),
    Layout("FSDP2, full AC, once", fsdp(2), 2, settings=ONCE, recompute="full", repeats=True),
    Layout("FSDP2 on the host, once", fsdp(2), 2, settings=ONCE, offload=True, repeats=True),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.slow] if layout.repeats else [])
        for layout in LAYOUTS
    ],
)
def test_equals_one_process(layout: Layout, references, pool: Pool) -> None:
    reference = references.run(
        documents=layout.documents,
        blocks=layout.blocks,
        overrides=layout.overrides,
        optimizer=layout.optimizer,
        freeze=layout.freeze,
    )
    found = differences(pool.run(layout.ranks, train, layout), reference)
    assert max(found.values()) < BOUND, found
