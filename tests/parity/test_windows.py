"""Mistral, Gemma 3, and Mistral with sinks, on layouts of up to eight ranks against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import (
    BOUND,
    REPLICAS,
    RING,
    TRACED,
    ULYSSES,
    UNBALANCED,
    Layout,
    cp,
    differences,
    fsdp,
    mesh_name,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.ranks import Pool
from titan.models import mistral
from titan.models.common.attention import Sinks

LAYOUTS = [
    Layout("FSDP2", fsdp(2)),
    Layout("HSDP", (*REPLICAS, *fsdp(2))),
    Layout("TP+SP", tp(2)),
    Layout("TP+SP, more ranks than key/value heads", tp(4)),
    Layout("CP all-gather", cp(2)),
    Layout("CP all-gather, contiguous parts", cp(2), settings=UNBALANCED, documents=False),
    Layout("CP ring", cp(2), settings=RING),
    Layout("CP ring, four ranks", cp(4), settings=RING, documents=False),
    Layout("CP Ulysses", cp(2), settings=ULYSSES),
    Layout("PP interleaved", pp(2), settings=schedule("Interleaved1F1B"), documents=False),
    Layout("compiled, selective AC", fsdp(2), compiled=TRACED, recompute="selective"),
    Layout(
        "CP ring x TP+SP, compiled, full AC",
        (*cp(2), *tp(2)),
        settings=RING,
        compiled=TRACED,
        recompute="full",
    ),
    Layout("PP x FSDP2 x TP+SP", (*pp(2), *fsdp(2), *tp(2)), documents=False),
    Layout("FSDP2 x CP x TP+SP", (*fsdp(2), *cp(2), *tp(2))),
]
DEFAULT = {("gemma3", "TP+SP"), ("sinks", "CP ring"), ("sinks", "TP+SP")}
# Weights of its norms begin at zero: they are AdamW's steps and nothing else, and a step divides a gradient's rounding
# error by the gradient's own size. A larger eps than the other tests' leaves steps in proportion to gradients.
# Pipelines refuse tied embeddings.
GEMMA: Any = {
    "model": ("gemma3", "tiny"),
    "overrides": (("tied_embeddings", False),),
    "optimizer": (("lr", 2e-3), ("eps", 1e-4)),
}
MODELS: dict[str, Any] = {
    "mistral": {"model": ("mistral", "tiny")},
    "gemma3": GEMMA,
    "sinks": {"model": ("mistral", "tiny")},
}


def train_with_sinks(layout: Layout) -> dict[str, Any]:
    """Train a Mistral that has a sink in each head, as no family of its size does."""
    build, plan = mistral.build_model, mistral.TENSOR_PLAN

    def with_sinks(config: mistral.MistralConfig) -> Any:
        model = build(config)
        for block in model.layers.values():
            block.attention.sinks = Sinks(config.n_heads)
        return model

    mistral.build_model = with_sinks
    mistral.TENSOR_PLAN = {**plan, "layers.*.attention.sinks": "head_vector"}
    try:
        return train(layout)
    finally:
        mistral.build_model, mistral.TENSOR_PLAN = build, plan


def program(name: str) -> Any:
    return train_with_sinks if name == "sinks" else train


_alone: dict[Any, dict[str, Any]] = {}


def one_process(name: str, pool: Pool, layout: Layout) -> dict[str, Any]:
    alone = Layout("one process", documents=layout.documents, **MODELS[name])
    if (name, alone) not in _alone:
        [_alone[name, alone]] = pool.run(1, program(name), alone)
    return _alone[name, alone]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            replace(layout, **settings),
            id=f"{name}-{layout.name}-{mesh_name(layout)}",
            marks=[] if (name, layout.name) in DEFAULT else [pytest.mark.slow],
        )
        for name, settings in MODELS.items()
        for layout in LAYOUTS
    ],
)
def test_equals_one_process(name: str, layout: Layout, pool: Pool) -> None:
    found = differences(
        pool.run(layout.ranks, program(name), layout), one_process(name, pool, layout)
    )
    assert max(found.values()) < BOUND, found


def test_windows_and_sinks_are_trained(pool: Pool) -> None:
    """A model without them has another loss, and sinks have a gradient."""
    layout = Layout("one process", documents=False, **MODELS["mistral"])
    losses = {}
    for name in ("mistral", "sinks"):
        losses[name] = one_process(name, pool, layout)
    wide = replace(layout, overrides=(("window", 0),))
    [losses["wide"]] = pool.run(1, train, wide)
    first = {name: run["losses"][0] for name, run in losses.items()}
    assert len(set(first.values())) == 3
    gradients = losses["sinks"]["gradients"]
    assert all(gradients[f"layers.{n}.attention.sinks.weight"].abs().min() > 0 for n in range(4))
