"""How often FSDP reduces gradients changes no number: once a step in place of each micro-batch."""

from __future__ import annotations

from typing import Any

from tests.support.layouts import (
    ALWAYS,
    BOUND,
    NEVER,
    REPLICAS,
    Layout,
    cp,
    differences,
    each,
    fsdp,
    train,
)
from tests.support.ranks import Pool

ONCE = (("fsdp_reduce_gradients", "step"),)
EXPERTS: dict[str, Any] = {"model": ("qwen3", "tiny_moe"), "documents": False}
SPLIT_EXPERTS = (("expert_parallel_degree", 2),)
LAYOUTS = [
    Layout("FSDP2, ZeRO-2, once", fsdp(2), 4, settings=(*ONCE, *NEVER)),
    Layout("HSDP, ZeRO-3, once", (*REPLICAS, *fsdp(2)), 2, settings=(*ONCE, *ALWAYS)),
    Layout("FSDP2 x CP, once", (*fsdp(2), *cp(2)), 4, settings=ONCE, repeats=True),
    Layout("FSDP2, full AC, once", fsdp(2), 2, settings=ONCE, recompute="full", repeats=True),
    Layout("FSDP2 on the host, once", fsdp(2), 2, settings=ONCE, offload=True, repeats=True),
    Layout("FSDP2, EP 2, once", fsdp(4), 2, settings=(*SPLIT_EXPERTS, *ONCE), **EXPERTS),
]


@each(LAYOUTS, "{0.name}")
def test_equals_one_process(layout: Layout, references, pool: Pool) -> None:
    same = ("documents", "blocks", "model", "overrides", "optimizer")
    reference = references.run(**{key: getattr(layout, key) for key in same})
    found = differences(pool.run(layout.ranks, train, layout), reference)
    assert max(found.values()) < BOUND, found
