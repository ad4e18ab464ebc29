"""What each mode recomputes, counted in matrix products and attentions; the numbers are the same bits (tests/parity)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import initialize
from titan.parallel.activation import apply_ac

LAYERS = 4


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def run(**mode: Any) -> tuple[Counter[str], float, list[torch.Tensor]]:
    """Calls of a forward and backward pass, the loss, the gradients."""
    model = build_model(dataclasses.replace(FLAVORS["debugmodel"], n_layers=LAYERS))
    initialize(model, seed=0, std_of=model.init_std)
    if mode:
        apply_ac(model, **mode)
    tokens = torch.arange(64).view(2, 32)
    with Count() as count:
        loss = model(tokens).square().mean()
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return count.calls, loss.item(), gradients


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# A block has 7 matrix products forward; recomputation stops early, before the last (w2's output is not needed).
PER_BLOCK = 6


@pytest.mark.parametrize(
    ("mode", "products", "attentions"),
    [
        ({"every": 1}, PER_BLOCK * LAYERS, LAYERS),
        ({"every": 2}, PER_BLOCK * LAYERS // 2, LAYERS // 2),
        # Kept: q, v, w1, w2 (the 1st, 3rd, 5th, 7th) and attention; run again: k, o, w3.
        ({"keep_ops": True}, 3 * LAYERS, 0),
    ],
    ids=["full", "every second block", "op"],
)
def test_what_is_recomputed(mode: dict[str, Any], products: int, attentions: int) -> None:
    plain, plain_loss, plain_gradients = run()
    calls, loss, gradients = run(**mode)
    assert calls["mm"] - plain["mm"] == products
    assert calls[ATTENTION] - plain[ATTENTION] == attentions
    assert loss == plain_loss
    assert len(gradients) == len(plain_gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))
