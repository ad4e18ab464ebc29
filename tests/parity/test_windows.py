"""Models with windows on layouts of up to eight ranks against one process: transformers' Mistral and Gemma 3, and a Llama with sinks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.layouts import (
    BOUND,
    REPLICAS,
    RING,
    SEQUENCE,
    TRACED,
    ULYSSES,
    UNBALANCED,
    Layout,
    cp,
    differences,
    fsdp,
    global_batch,
    job_of,
    largest,
    mesh_name,
    pp,
    schedule,
    tp,
    train,
)
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.data.packing import IGNORED
from titan.models import llama3
from titan.models.common.attention import Sinks
from titan.parallel import build_mesh

HERE = Path(__file__).parent
WINDOW = 24  # as in the files
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
DEFAULT = {
    ("sinks", "CP ring"),
    ("sinks", "TP+SP"),
}  # titan/contrib/transformers/tests/test_transformers.py has others of transformers
MODELS: dict[str, Any] = {
    "mistral": {"model": ("transformers", str(HERE / "mistral.json"))},
    # Two of four layers are global, with another rotary table. Weights of its norms begin at zero: they are AdamW's steps and
    # nothing else, and a step divides a gradient's rounding error by the gradient's own size. A larger eps than the other
    # tests' leaves steps in proportion to gradients. Pipelines refuse tied embeddings.
    "gemma3": {
        "model": ("transformers", str(HERE / "gemma3.json")),
        "optimizer": (("lr", 2e-3), ("eps", 1e-4)),
    },
    "sinks": {"model": ("llama3", "tiny")},
}


def train_with_sinks(layout: Layout, window: int = WINDOW) -> dict[str, Any]:
    """Train a Llama that has a window in each layer and a sink in each head, as no family of its size does."""
    build, plan = llama3.build_model, llama3.TENSOR_PLAN

    def with_sinks(config: llama3.LlamaConfig) -> Any:
        model: Any = build(config)
        for block in model.layers.values():
            block.attention.inner_attention.window = window
            block.attention.sinks = Sinks(config.n_heads)
        return model

    llama3.build_model = with_sinks
    llama3.TENSOR_PLAN = {**plan, "layers.*.attention.sinks": "head_vector"}
    try:
        return train(layout)
    finally:
        llama3.build_model, llama3.TENSOR_PLAN = build, plan


def program(name: str) -> Any:
    return train_with_sinks if name == "sinks" else train


_alone: dict[tuple[str, bool], dict[str, Any]] = {}


def one_process(name: str, pool: Pool, layout: Layout) -> dict[str, Any]:
    key = name, layout.documents
    if key not in _alone:
        alone = Layout("one process", documents=layout.documents, **MODELS[name])
        [_alone[key]] = pool.run(1, program(name), alone)
    return _alone[key]


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


def transformers_alone(layout: Layout) -> dict[str, Any]:
    """Return the loss and the gradients of the first step of transformers' own model, attention and masks, by our names."""
    import transformers

    mesh = build_mesh("cpu")
    model: Any = build_step(job_of(layout, steps=1), mesh).model_parts[0]
    content = json.loads(model.config.source.hf)
    config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
    twin = getattr(transformers, content["architectures"][0])(config)
    twin.set_attn_implementation("eager")
    theirs = dict(twin.named_parameters())
    names = {name: model.hf_name(name) for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs[names[name]].copy_(parameter)
    tokens_BS, labels_BS, _ = global_batch(1)
    logits_BSV = twin(input_ids=tokens_BS, use_cache=False).logits
    loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)
    loss.backward()
    return {"losses": [loss.item()], "gradients": {n: theirs[names[n]].grad for n in names}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_one_process_and_layouts_equal_transformers_alone(name: str, pool: Pool) -> None:
    alone = Layout("one process", documents=False, **MODELS[name])
    [expected] = pool.run(1, transformers_alone, alone)
    layouts = [replace(alone, degrees=degrees) for degrees in ((), (*pp(2), *fsdp(2), *tp(2)))]
    for layout in (*layouts, replace(alone, degrees=cp(2), settings=RING)):
        found = pool.run(layout.ranks, train, layout, "float32", 1)
        for what in ("losses", "gradients"):
            assert largest(found, expected, what) < BOUND, (layout, what)


@pytest.mark.parametrize(
    "name", ["sinks", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "gemma3"))]
)
def test_windows_and_sinks_are_trained(name: str, pool: Pool) -> None:
    """A model without windows has another loss, and sinks have a gradient."""
    layout = Layout("one process", documents=False, **MODELS[name])
    wide: list[Any] = [layout, SEQUENCE]
    if name != "sinks":
        wide = [replace(layout, overrides=(("sliding_window", SEQUENCE),))]
    [without] = pool.run(1, program(name), *wide)
    alone = one_process(name, pool, layout)
    assert alone["losses"][0] != without["losses"][0]
    for layer in range(4 if name == "sinks" else 0):
        assert alone["gradients"][f"layers.{layer}.attention.sinks.weight"].abs().min() > 0
