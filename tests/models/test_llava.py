"""LLaVA against transformers' implementation, sharded against one process, and its pictures and rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.layouts import (
    ALWAYS,
    BOUND,
    GLOBAL_BATCH,
    REPLICAS,
    SEQUENCE,
    TRACED,
    ULYSSES,
    ZERO_BUBBLE,
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
from titan.data.base import TensorBatch
from titan.data.packing import IGNORED, pack
from titan.data.special_tokens import SpecialTokens
from titan.models.llava import FLAVORS
from titan.models.llava.task import PictureBatch

SMALL = dataclasses.replace(FLAVORS["tiny"], n_layers=2)
PATCHES, TOKEN, BOS, EOS = SMALL.num_patches, SMALL.image_token, 1, 2
ROOM = 3  # pictures of a row


def picture_batch(layout: Layout, step: int) -> TensorBatch:
    """Rows of nought to three documents with a picture, and one without; the last row has none, and most rows have padding."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.full((GLOBAL_BATCH, SEQUENCE + 1), IGNORED)
    for number, row in enumerate(rows):
        documents = []
        for _ in range((number + 1) % (ROOM + 1)):
            text = torch.randint(3, TOKEN, (3 + 2 * number % 9,), generator=generator)
            documents += [BOS, *[TOKEN] * PATCHES, *text.tolist(), EOS]
        documents += [BOS, *torch.randint(3, TOKEN, (4,), generator=generator).tolist(), EOS]
        row[: len(documents)] = torch.tensor(documents)
    images = torch.randn(GLOBAL_BATCH, ROOM, PATCHES, SMALL.patch_dim, generator=generator)
    packed = pack(
        rows.numpy(),
        special_tokens=SpecialTokens(BOS, EOS),
        reset_positions=True,
        document_mask=True,
    )
    return PictureBatch.of(packed, images, image_token=TOKEN)


def rows(*layouts: tuple[str, tuple[tuple[str, int], ...], dict[str, Any]]) -> list[Layout]:
    shared: dict[str, Any] = {"model": ("llava", "tiny"), "batch": picture_batch}
    return [Layout(name, degrees, **shared, **options) for name, degrees, options in layouts]


FIRST_LESS = ("pipeline_parallel_first_stage_less_layers", 1)
LAYOUTS = rows(
    ("accumulation", (), {"accumulation": 2}),
    ("FSDP2", fsdp(2), {"settings": ALWAYS}),
    ("FSDP2, two blocks in a unit", fsdp(2), {"settings": (("fsdp_blocks_per_unit", 2),)}),
    ("FSDP2, prefetch", fsdp(2), {"settings": (("fsdp_prefetch", 2),)}),
    ("HSDP", (*REPLICAS, *fsdp(2)), {"accumulation": 2}),
    ("DDP", REPLICAS, {}),
    ("TP+SP", tp(2), {}),
    ("CP all-gather", cp(2), {}),
    ("CP Ulysses", cp(2), {"settings": ULYSSES}),
    ("PP 1F1B", pp(2), {}),
    ("PP interleaved", pp(2), {"settings": schedule("Interleaved1F1B")}),
    ("PP zero bubble", pp(2), {"settings": ZERO_BUBBLE}),
    ("FSDP2 x TP+SP, full AC", (*fsdp(2), *tp(2)), {"recompute": "full"}),
    ("FSDP2, selective AC, compiled", fsdp(2), {"recompute": "selective", "compiled": TRACED}),
    ("TP+SP, compiled", tp(2), {"compiled": TRACED}),
    ("FSDP2 x CP x TP+SP", (*fsdp(2), *cp(2), *tp(2)), {}),
    ("PP x FSDP2 x TP+SP", (*pp(2), *fsdp(2), *tp(2)), {}),
    ("FSDP2, frozen encoder, full AC", fsdp(2), {"freeze": ("vision.*",), "recompute": "full"}),
    ("TP+SP, only the projector", tp(2), {"freeze": ("vision.*", "[tlno]*"), "compiled": TRACED}),
)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    """Return what one process computes with the same parameters frozen."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def get(freeze: tuple[str, ...]) -> dict[str, Any]:
        if freeze not in known:
            [layout] = rows(("one process", (), {"freeze": freeze}))
            [known[freeze]] = pool.run(1, train, layout)
        return known[freeze]

    return get


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_one_process(layout: Layout, alone: Any, pool: Pool) -> None:
    reference, results = alone(layout.freeze), pool.run(layout.ranks, train, layout)
    for result in results:
        # Softmax takes no notice of what all keys share: these gradients are rounding errors, and so are the weights.
        for name in [name for name in result["weights"] if name.endswith(".wk.bias")]:
            found = result["gradients"].pop(name, torch.zeros(1))
            assert found.abs().max() < 1e-7 and result["weights"].pop(name).abs().max() < 1e-3
    reference = reference | {
        what: {n: t for n, t in reference[what].items() if not n.endswith(".wk.bias")}
        for what in ("gradients", "weights")
    }
    found = differences(results, reference)
    assert max(found.values()) < BOUND, found
