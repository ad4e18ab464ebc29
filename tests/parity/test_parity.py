"""Every layout computes the same losses, norms, gradients and weights as one process; docs/parity.md sums it up."""

from __future__ import annotations

import torch

from tests.support import parity_page
from tests.support.layouts import (
    BOUND,
    LAYOUTS,
    REPLICAS,
    Layout,
    differences,
    each,
    fsdp,
    largest,
    mesh_name,
    train,
)
from tests.support.ranks import Pool


@each(LAYOUTS)
def test_equals_one_process(layout: Layout, references, pool: Pool, parity_table) -> None:
    reference = references.run(
        documents=layout.documents,
        blocks=layout.blocks,
        overrides=layout.overrides,
        optimizer=layout.optimizer,
        freeze=layout.freeze,
    )
    parity_table.expected = len(LAYOUTS)
    found = differences(pool.run(layout.ranks, train, layout), reference)
    assert max(found.values()) < BOUND, found
    parity_table.add(
        layout.name,
        mesh=mesh_name(layout),
        accumulation=layout.accumulation,
        differences=found,
        bound=BOUND,
    )


def test_bf16_computes_the_same_on_every_layout(references, pool: Pool) -> None:
    """bf16 compute, fp32 reduction. Against itself on one process the difference is that of fp32 sums, where a value
    falls on the other side of a bf16 rounding; against fp32 it is bf16's 8 bits.
    """
    reference = references.run()
    alone = pool.run(1, train, Layout("one process"), "bfloat16")[0]
    assert alone["gradients"]["norm.weight"].dtype == torch.float32
    for layout in (Layout("FSDP2", fsdp(2)), Layout("DDP", REPLICAS)):
        results = pool.run(2, train, layout, "bfloat16")
        assert largest(results, alone, "losses") < 1e-4
        assert largest(results, alone, "norms") < 2e-3
        assert largest(results, reference, "losses") < 1e-3
        gradients = largest(results, reference, "gradients")
        assert 1e-3 < gradients < 4e-2  # and it is bf16 that was used


def test_there_is_a_row_for_each_layout() -> None:
    names = {row.layout for row in parity_page.read() if row.table == "dense"}
    assert {layout.name for layout in LAYOUTS} <= names


def test_the_page_sums_up_the_rows() -> None:
    """`python -m tests.support.parity_page` writes it."""
    page = parity_page.PAGE.read_text(encoding="utf-8")
    assert parity_page.updated(page) == page
