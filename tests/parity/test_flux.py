"""Flux on every layout computes what one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.layouts import (
    BOUND,
    GLOBAL_BATCH,
    IN_UNITS,
    NEVER,
    REPLICAS,
    RING,
    TRACED,
    ULYSSES,
    UNBALANCED,
    Layout,
    cp,
    differences,
    fsdp,
    job_of,
    largest,
    mesh_name,
    tp,
    train,
)
from tests.support.ranks import Pool
from titan.data.base import TensorBatch
from titan.tasks import task_of


def flow_batch(layout: Layout, step: int) -> TensorBatch:
    """Return the global batch of a step, whose last sample does not count."""
    task = task_of(job_of(layout))
    samples = task.dataset("train", rank=0, world=1)
    first = GLOBAL_BATCH * (step - 1)
    rows = samples.get(np.arange(first, first + GLOBAL_BATCH))
    batch = task.collate(samples)(rows, first_sample=first)
    batch.ignore_from(GLOBAL_BATCH - 1)
    return batch


# Gates that begin at zero would hide most gradients.
FLUX: dict[str, Any] = {
    "model": ("flux", "tiny"),
    "overrides": (("gate_init_std", 0.1), ("guidance_embed", True)),
    "task": (("size", 16), ("context_len", 8)),
    "batch": flow_batch,
    "documents": False,
}
SLOW: dict[str, Any] = {"repeats": True}
LAYOUTS = [
    Layout("one process", accumulation=2),
    Layout("FSDP2", fsdp(2)),
    Layout(
        "FSDP2, two blocks in a unit, ZeRO-2", fsdp(2), 2, settings=(*IN_UNITS, *NEVER), **SLOW
    ),
    Layout("FSDP2", fsdp(8), **SLOW),
    Layout("DDP", REPLICAS, 2),
    Layout("HSDP", (*REPLICAS, *fsdp(2)), **SLOW),
    Layout("TP", tp(2)),
    Layout("TP", tp(4), **SLOW),
    Layout("CP all-gather", cp(2)),
    Layout("CP all-gather, not balanced", cp(4), settings=UNBALANCED, **SLOW),
    Layout("CP ring", cp(2), settings=RING),
    Layout("CP ring", cp(4), settings=RING, **SLOW),
    Layout("CP Ulysses", cp(2), settings=ULYSSES),
    Layout("CP Ulysses", cp(4), settings=ULYSSES, **SLOW),
    Layout("FSDP2 x TP", (*fsdp(2), *tp(2)), 2, **SLOW),
    Layout("HSDP x CP x TP", (*REPLICAS, *cp(2), *tp(2)), **SLOW),
    Layout("FSDP2 x CP ring x TP", (*fsdp(2), *cp(2), *tp(2)), settings=RING, **SLOW),
    Layout("TP, full AC", tp(2), recompute="full", **SLOW),
    Layout("FSDP2, selective AC", fsdp(2), recompute="selective", **SLOW),
    Layout("FSDP2, compiled", fsdp(2), compiled=TRACED, **SLOW),
    Layout("TP, compiled, full AC", tp(2), compiled=TRACED, recompute="full", **SLOW),
    Layout("CP ring, compiled", cp(2), settings=RING, compiled=TRACED, **SLOW),
]
IDS = [f"{layout.name}-{mesh_name(layout)}" for layout in LAYOUTS]


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> dict[str, Any]:
    [result] = pool.run(1, train, Layout("one process", **FLUX))
    return result


# As tests/parallel/test_float8.py has them: what casts equal tensors computes equal numbers; sums in another order flip some roundings.
EXACT, FLIPS = 1e-5, 1e-2


FLOAT8 = [
    ("tensorwise", Layout("FSDP2", fsdp(2)), EXACT),
    ("rowwise", Layout("FSDP2", fsdp(2)), EXACT),
    ("tensorwise", Layout("TP", tp(2)), FLIPS),
    ("rowwise", Layout("TP", tp(2)), FLIPS),
    ("rowwise", Layout("CP", cp(2)), FLIPS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout", "bound"),
    FLOAT8,
    ids=lambda value: value.name if isinstance(value, Layout) else value,
)
def test_float8_gradients(pool: Pool, recipe: str, layout: Layout, bound: float) -> None:
    pytest.importorskip("torchao")
    # A micro-batch has a scale of its own, as a data-parallel rank has.
    split = dict(layout.degrees).get("dp_shard", 1)
    base = Layout("one process", (), split, **FLUX)
    [exact] = pool.run(1, train, base, "float32", 1)
    [alone] = pool.run(1, train, replace(base, float8=recipe), "float32", 1)
    found = pool.run(layout.ranks, train, replace(layout, float8=recipe, **FLUX), "float32", 1)
    # It is 8 bits, which move all gradients together by 0.15 to 0.18. A wrong scale would move them by 1 or more.
    whole, rounded = (
        torch.cat([run["gradients"][name].flatten() for name in exact["gradients"]])
        for run in (exact, alone)
    )
    assert 0.05 < (rounded - whole).norm() / whole.norm() < 0.25
    assert largest(found, alone, "gradients") < bound


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(x, id=i, marks=pytest.mark.slow if x.repeats else ())
        for x, i in zip(LAYOUTS, IDS, strict=True)
    ],
)
def test_equals_one_process(pool: Pool, one_process: dict[str, Any], layout: Layout) -> None:
    found = differences(pool.run(layout.ranks, train, replace(layout, **FLUX)), one_process)
    assert max(found.values()) < BOUND, found
