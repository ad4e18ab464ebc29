"""transformers' Llama on FSDP2 x CP x TP, compiled and recomputed, trains as it does in one process without titan, and is saved."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pool import Pool
from titan.parallel import initialize, materialize

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_llama.py"


def on_ranks(folder: str, steps: int) -> float:
    return runpy.run_path(str(EXAMPLE))["train"](folder, steps, backend="aot_eager")


def alone(steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The last loss and the weights of transformers' own model, with its own attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    config = LlamaConfig(**{**names["CONFIG"].to_dict(), "attn_implementation": "sdpa"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    materialize(model, device="cpu", fill_buffers=model._init_weights)
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.02)
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.zeros(())
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
        pool.run(world, on_ranks, str(tmp_path), 4) == [pytest.approx(expected, rel=1e-5)] * world
    )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert {name for name, _ in saved.named_parameters()} == weights.keys()
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), weights[name], rtol=1e-3, atol=1e-5, msg=name
        )
