"""transformers' Llama on FSDP2 x CP x TP, compiled and recomputed, trains as it does in one process without titan, and is saved."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import Pool
from titan.parallel import (
    apply_float8,
    apply_fsdp,
    apply_tp,
    build_mesh,
    initialize,
    materialize,
)

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_llama.py"


# Where a gradient is smaller than eps, Adam's update follows its rounding: a first one of 2e-10 moved a weight by 7e-5.
AdamW = functools.partial(torch.optim.AdamW, eps=1e-6)


def on_ranks(folder: str, steps: int) -> float:
    with patch("torch.optim.AdamW", AdamW):
        return runpy.run_path(str(EXAMPLE))["train"](folder, steps, backend="aot_eager")


def alone(steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The last loss and the weights of transformers' own model, with its own attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    config = LlamaConfig(**names["CONFIG"].to_dict() | {"attn_implementation": "sdpa"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    materialize(model, device="cpu", fill_buffers=model._init_weights)
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.02)
    optimizer, loss = AdamW(model.parameters(), lr=3e-3), torch.zeros(())
    for rows in names["batches"](steps):
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_it_trains_as_transformers_alone_and_is_saved(
    pool: Pool, world: int, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    ((expected, weights),) = pool.run(1, alone, 4)
    assert (
        pool.run(world, on_ranks, str(tmp_path), 4)
        == [pytest.approx(expected, rel=1e-5)] * world
    )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert {name for name, _ in saved.named_parameters()} == weights.keys()
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), weights[name], rtol=1e-3, atol=1e-5, msg=name
        )


def test_the_callback_fills_buffers_as_transformers_does() -> None:
    names = runpy.run_path(str(EXAMPLE))
    with torch.device("meta"):
        model = names["LlamaForCausalLM"](names["CONFIG"])
    materialize(model, device="cpu", fill_buffers=model._init_weights)
    built = dict(names["LlamaForCausalLM"](names["CONFIG"]).named_buffers())
    assert {"model.rotary_emb.inv_freq"} <= built.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(value, built[name]) for name, value in model.named_buffers())


def loaded(tp: int) -> torch.Tensor:
    """Logits of a model that has its weights before it is split, as after from_pretrained."""
    names = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = names["LlamaForCausalLM"](names["CONFIG"])
    for layer in model.model.layers:
        layer.self_attn.causal = names["CausalAttention"]()
    mesh = build_mesh("cpu", tp=tp, dp_shard=1)
    if tp > 1:
        plan = names["PLAN"]
        apply_tp(model, mesh=mesh["tp"], plan=plan, num_kv_heads=2, loss_parallel=False)
    apply_fsdp(model, mesh=mesh["dp_shard"], blocks=model.model.layers, gradients="sum")
    tokens = torch.arange(32).reshape(2, 16)
    return model(input_ids=tokens, position_ids=torch.arange(16).expand(2, 16)).logits.detach()


def test_a_model_with_weights_is_split_as_it_is(pool: Pool) -> None:
    (expected,) = pool.run(1, loaded, 1)
    for found in pool.run(2, loaded, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_float8_leaves_lm_head_alone() -> None:
    pytest.importorskip("torchao")
    names = runpy.run_path(str(EXAMPLE))
    with torch.device("meta"):
        model = names["LlamaForCausalLM"](names["CONFIG"])
    kept = {c.name: c.kept for c in apply_float8(model, emulate=True) if c.kept}
    assert kept == {"lm_head": "the output layer: its rounding would go straight into the loss"}


def test_gpt2_is_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
        model = transformers.GPT2LMHeadModel(config)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(
        ValueError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D: put an nn\."
    ):
        apply_tp(model, mesh=mesh, plan={"transformer.h.*.c_attn": "colwise"}, num_kv_heads=2)
