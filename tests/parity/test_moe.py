"""Experts on every layout compute what one process does; each token goes to the same experts."""

from __future__ import annotations

import pytest

from tests.support.layouts import (
    BOUND,
    REPLICAS,
    Layout,
    cp,
    differences,
    fsdp,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.ranks import Pool

QWEN = ("qwen3", "tiny_moe")
# All balance terms at once, large enough to be seen in the gradients.
TERMS = (
    ("load_balance_coeff", 1e-2),
    ("sequence_balance_coeff", 1e-2),
    ("global_balance_coeff", 1e-2),
    ("router_z_loss_coeff", 1e-2),
)


def ep(n: int) -> tuple[tuple[str, int], ...]:
    return (("expert_parallel_degree", n),)


LAYOUTS = [
    Layout("one process", accumulation=2),
    Layout("FSDP2, EP 1", fsdp(2)),
    Layout("FSDP2, EP 2", fsdp(2), settings=ep(2)),
    Layout("FSDP2, EP 2", fsdp(4), settings=ep(2)),
    Layout("HSDP, EP 2", (*REPLICAS, *fsdp(2)), settings=ep(2)),
    Layout("TP+SP, EP 1", tp(2), settings=ep(1)),
    Layout("TP+SP, EP 2", tp(2), settings=ep(2)),
    Layout("DDP x TP+SP, EP 2", (*REPLICAS, *tp(2)), settings=ep(2)),
    Layout("CP, EP 2", cp(2), settings=ep(2)),
    Layout("FSDP2 x TP+SP, EP 4", (*fsdp(2), *tp(2)), settings=ep(4)),
    Layout("PP x FSDP2, EP 2", (*pp(2), *fsdp(2)), settings=ep(2)),
    Layout(
        "PP zero bubble x FSDP2, EP 2",
        (*pp(2), *fsdp(2)),
        settings=(*ep(2), *schedule("InterleavedZeroBubble")),
    ),
    Layout("FSDP2, EP 2, full AC", fsdp(2), settings=ep(2), recompute="full"),
    Layout("FSDP2, EP 2, selective AC", fsdp(2), settings=ep(2), recompute="selective"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.ranks}")
def test_equals_one_process(layout: Layout, references, pool: Pool) -> None:
    settings = {"model": QWEN, "overrides": TERMS}
    reference = references.run(documents=layout.documents, blocks=layout.blocks, **settings)
    layout = Layout(**{**vars(layout), **settings})
    results = pool.run(layout.ranks, train, layout)
    found = differences(results, reference)
    assert max(found.values()) < BOUND, found
    for result in results:
        for step, expected in zip(result["loads"], reference["loads"], strict=True):
            assert step.items() <= expected.items()
        assert result["biases"].items() <= reference["biases"].items()
