"""Each technique on three ranks, which divide neither widths nor vocabulary, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import layouts
from tests.support.layouts import ALWAYS, BOUND, NEVER, Layout, cp, differences, fsdp, pp, tp
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.data.base import TensorBatch
from titan.data.packing import Batch
from titan.numerics.certify.steps import micro_batches, record
from titan.parallel import build_mesh

BATCH, SEQUENCE, VOCABULARY, STEPS = 6, 48, 2048, 3
HEADS = {"n_heads": 6, "n_kv_heads": 3, "dim": 96, "ffn_dim": 192}
ODD = {"dim": 80, "n_heads": 5, "n_kv_heads": 5, "ffn_dim": 176, "vocab_size": VOCABULARY}
MOE: Any = {"model": ("qwen3", "tiny_moe"), "documents": False}
SIX = (("num_experts", 6),)


def batch(layout: Layout, step: int) -> TensorBatch:
    tokens = torch.randint(
        VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
    )
    documents = torch.arange(SEQUENCE).ge(20).long().expand(BATCH, -1)
    return Batch(
        tokens_BS=tokens[:, :-1],
        labels_BS=tokens[:, 1:].contiguous(),
        document_ids_BS=documents if layout.documents else None,
    )


def train(layout: Layout) -> dict[str, Any]:
    """Run on each rank: as tests/parity, with sizes that three ranks share."""
    whole = layouts.GLOBAL_BATCH
    layouts.GLOBAL_BATCH = BATCH  # pyrefly: ignore[bad-assignment]
    try:
        job = layouts.job_of(layout, steps=STEPS)
    finally:
        layouts.GLOBAL_BATCH = whole
    training = job.training.model_copy(update={"seq_len": SEQUENCE})
    job = job.model_copy(update={"training": training})
    mesh = build_mesh("cpu", **dict(layout.degrees))
    found = (layout.batch(layout, 1) for _ in range(STEPS))
    step = build_step(job, mesh)
    return record(step, (micro_batches(b, mesh, layout.accumulation) for b in found))


def odd(name: str, degrees: Any, **options: Any) -> Layout:
    return Layout(name, degrees, batch=batch, overrides=tuple(ODD.items()), **options)


LAYOUTS = [
    odd("FSDP2", fsdp(3), settings=ALWAYS),
    odd("FSDP2, accumulated, clipped", fsdp(3), accumulation=2),
    odd("ZeRO-2", fsdp(3), settings=NEVER),
    odd("parameters on the host", fsdp(3), offload=True),
    odd("full AC, compiled", fsdp(3), recompute="full", compiled="aot_eager"),
    odd("update in the backward pass", fsdp(3), optimizer=(("early_step_in_backward", True),)),
    odd("Muon", fsdp(3), optimizer=(("name", "Muon"), ("ns_dtype", "float32"))),
    odd("DDP", (("dp_replicate", 3),)),
    odd("HSDP", (("dp_replicate", 2), ("dp_shard", 3))),
    odd("CP", cp(3)),
    odd("PP", pp(3), blocks=5),
    Layout("TP+SP", tp(3), batch=batch, overrides=tuple(HEADS.items())),
    Layout("EP", fsdp(3), batch=batch, settings=(("expert_parallel_degree", 3),), overrides=SIX, **MOE),
    Layout("experts in parts", fsdp(3), batch=batch, **MOE),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def test_three_ranks_equal_one(layout: Layout, pool: Pool) -> None:
    alone = replace(layout, degrees=(), settings=(), offload=False)
    [expected] = pool.run(1, train, alone)
    found = differences(pool.run(layout.ranks, train, layout), expected)
    assert max(found.values()) < BOUND, found


ROUNDED = [
    odd("states in 8 bits", fsdp(3), optimizer=(("name", "AdamW8bit"),)),
    odd("float8", fsdp(3), float8="tensorwise"),
]


@pytest.mark.parametrize("layout", ROUNDED, ids=[layout.name for layout in ROUNDED])
def test_three_ranks_round_other_groups_of_numbers(layout: Layout, pool: Pool) -> None:
    [expected] = pool.run(1, train, replace(layout, degrees=()))
    for found in pool.run(3, train, layout):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
