"""What each mode recomputes, counted in matrix products and attentions; the numbers are the same bits (tests/parity)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.operations import Watch
from tests.support.tables import tabled
from titan.config.schema import ActivationCheckpointSection
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import initialize
from titan.parallel.activation import apply_ac
from titan.parallel.sac_save_list import DEFAULT_KEEP, SaveListError

LAYERS = 4


def debug_model() -> Any:
    model = build_model(dataclasses.replace(FLAVORS["tiny"], n_layers=LAYERS))
    initialize(model, seed=0, std_of=model.init_std)
    return model


def run(**mode: Any) -> tuple[Counter[str], float, list[torch.Tensor]]:
    model = debug_model()
    if mode:
        apply_ac(model, **mode)
    return step(model)


def step(model: Any) -> tuple[Counter[str], float, list[torch.Tensor]]:
    """Calls of a forward and backward pass, the loss, the gradients."""
    calls = Counter[str]()
    with Watch(lambda func, *_: calls.update([str(func).split(".")[1]])):
        loss, gradients = train(model)
    return calls, loss, gradients


def train(model: Any) -> tuple[float, list[torch.Tensor]]:
    tokens = torch.arange(64).view(2, 32)
    loss = model(tokens).square().mean()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


# A block has 7 matrix products forward; recomputation stops early, before the last (w2's output is not needed).
# ({"keep": DEFAULT_KEEP}, 3 * LAYERS, 0): Kept: q, v, w1, w2 (the 1st, 3rd, 5th, 7th) and attention; run again: k, o, w3.
# ({"keep": ["matmul/3", "attention"]}, 4 * LAYERS, 0): kept: q, o, w2
# ({"keep": ["aten.mm@0,3,4"]}, 3 * LAYERS, LAYERS): kept: q, o, w1
@tabled(
    "mode, products, attentions",
    ids=[
        "full",
        "every 2nd block",
        "op",
        "every 3rd",
        "all",
        "places",
        "some blocks",
        "nothing",
        "attention",
    ],
)
def test_what_is_recomputed(mode: dict[str, Any], products: int, attentions: int) -> None:
    plain, plain_loss, plain_gradients = run()
    calls, loss, gradients = run(**mode)
    assert calls["mm"] - plain["mm"] == products
    assert calls[ATTENTION] - plain[ATTENTION] == attentions
    assert loss == plain_loss
    assert len(gradients) == len(plain_gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))


@tabled("mode, message")
def test_what_does_not_exist_cannot_be_kept(mode: dict[str, Any], message: str) -> None:
    with pytest.raises(SaveListError, match=message):
        apply_ac(debug_model(), **mode)


def test_every_counts_from_one() -> None:
    with pytest.raises(ValueError, match="every is 0: 1 is each block"):
        apply_ac(debug_model(), every=0)


@pytest.mark.parametrize("keep", [(), DEFAULT_KEEP], ids=["full", "op"])
def test_dropout_is_recomputed_as_it_was(keep: tuple[str, ...]) -> None:
    """By default, as in torch: else gradients would be those of other random numbers."""
    gradients = []
    for recomputed in (False, True):
        block = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Tanh())
        model: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
        if recomputed:
            apply_ac(model, keep=keep)
        torch.manual_seed(0)
        x = torch.ones(4, 8, requires_grad=True)
        model["layers"][0](x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_default_list_is_the_config_s() -> None:
    section = ActivationCheckpointSection()
    assert tuple(section.op_keep) == DEFAULT_KEEP
