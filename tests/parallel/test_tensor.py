"""Tensor parallelism by `apply_tp` alone, on a model of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.ranks import RankFailed
from tests.support.tables import tabled
from titan.parallel import (
    apply_tp,
    build_mesh,
    initialize,
)

PLAN = {
    "embed": "vocab_embedding",
    "blocks.*.norm": "sequence",
    "blocks.*.enter": "gather_input",
    "blocks.*.up": "colwise",
    "blocks.*.value": "kv_colwise",
    "blocks.*.down": "rowwise",
    "head": "vocab_output",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(8), nn.Identity()
        self.up, self.value, self.down = nn.Linear(8, 12), nn.Linear(8, 6), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(self.norm(x))
        return x + self.down(torch.tanh(self.up(h)))


class Net(nn.Module):
    """The embedding goes straight into a block; the blocks' values are only there to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Called(Net):
    """The same, its modules called by name, the tensor to gather not first and among others."""

    class Mix(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.up, self.down = block.up, block.down

        def forward(
            self, shift: torch.Tensor, scale: float, hidden: torch.Tensor
        ) -> torch.Tensor:
            return self.down(input=torch.tanh(self.up(input=hidden) + shift * scale))

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList([self.Mix(block) for block in self.blocks])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(input=tokens)
        shift = torch.linspace(-1, 1, tokens.shape[1])[None, :, None]
        for block, mix in zip(self.blocks, self.mixes, strict=True):
            x = x + mix(hidden=block.get_submodule("norm")(input=x), scale=0.5, shift=shift)
        return self.head(input=x)


def _after_a_pass(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(0))
    model(tokens).square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _called_by_name(tp: int) -> dict[str, torch.Tensor]:
    model = Called()
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.3)
    if tp > 1:
        plan = {"mixes.*.up": "colwise", "mixes.*.down": "rowwise", **PLAN}
        plan |= {"mixes.*": "gather_input:hidden"}
        mesh = build_mesh("cpu", tp=tp, dp_shard=1)["tp"]
        apply_tp(model, mesh=mesh, plan=plan, num_kv_heads=2, loss_parallel=False)
    return _after_a_pass(model)


def test_modules_may_be_called_by_name(pool) -> None:
    (expected,) = pool.run(1, _called_by_name, 1)
    assert expected["blocks.1.up.weight"].norm() > 0.1
    for found in pool.run(2, _called_by_name, 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


class Taker(nn.Module):
    """Returns what it was given."""

    def forward(self, hidden, other=None, *rest, **more):
        return hidden, other, rest, more


def _gathered() -> list[list[int]]:
    """Lengths of two tensors, of which one was to be gathered."""
    mesh, found = build_mesh("cpu", tp=2)["tp"], []
    x = torch.ones(1, 3, 2)
    for style, args, kwargs in (
        ("gather_input", (x, x), {}),
        ("gather_input", (), {"other": x, "hidden": x}),  # the first of the signature
        ("gather_input", (None, x), {}),
        ("gather_input", (), {"hidden": (x, x), "other": x}),
        ("gather_input:other", (x, x), {}),
        ("gather_input:other", (x,), {"other": x}),
    ):
        module = Taker()
        apply_tp(nn.ModuleDict({"m": module}), mesh=mesh, plan={"m": style}, num_kv_heads=2)
        out = module(*args, **kwargs)[:2]
        found.append([t.shape[1] if isinstance(t, torch.Tensor) else 0 for t in out])
    return found


def test_which_argument_is_gathered(pool) -> None:
    expected = [[6, 3], [6, 3], [0, 6], [0, 6], [3, 6], [3, 6]]
    assert pool.run(2, _gathered) == [expected, expected]


def _gather_nothing(style: str) -> None:
    module = Taker()
    mesh = build_mesh("cpu", tp=2)["tp"]
    apply_tp(nn.ModuleDict({"m": module}), mesh=mesh, plan={"m": style}, num_kv_heads=2)
    module(hidden=1, mask=2)


@tabled("style, message")
def test_nothing_to_gather(pool, style: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, _gather_nothing, style)


def _still_trained() -> list[str]:
    mesh = build_mesh("cpu", tp=2, dp_shard=1)
    found = []
    for output_in_loss in (False, True):
        with torch.device("meta"):
            model = Net().requires_grad_(False)
        apply_tp(
            model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=1, output_in_loss=output_in_loss
        )
        found += [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
    return found


def test_frozen_parameters_stay_frozen(pool) -> None:
    """Of every style."""
    assert pool.run(2, _still_trained) == [[], []]


def _split(
    change: dict[str, str], heads: int, length: int, up: nn.Module | None = None
) -> None:
    mesh = build_mesh("cpu", tp=2, dp_shard=1)
    model = Net()
    model.blocks[0].up = nn.Linear(8, 11) if up is None else up
    apply_tp(model, mesh=mesh["tp"], plan=PLAN | change, num_kv_heads=heads)
    model.embed(torch.zeros(1, length, dtype=torch.int64))


@tabled("change, heads, length, message")
def test_what_does_not_divide_is_refused(pool, change, heads, length, message) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, _split, change, heads, length)


class Conv1D(nn.Module):
    """As GPT-2's in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 12))


@pytest.mark.parametrize(
    ("heads", "up", "message"),
    [
        (
            2,
            Conv1D(),
            r"style colwise splits an nn\.Linear, and blocks\.0\.up is a Conv1D: put",
        ),
        (2, nn.Embedding(8, 12), r"splits an nn\.Linear, and blocks\.0\.up is a Embedding"),
        (
            4,
            nn.Linear(8, 12),
            r"6 outputs of blocks\.0\.value are not 4 key/value heads of one",
        ),
        (
            2,
            nn.Linear(8, 14),
            r"14 outputs of blocks\.0\.up, in heads of 3, are not whole heads",
        ),
    ],
)
def test_a_module_that_a_style_cannot_split_is_named(pool, heads, up, message) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, _split, {}, heads, 4, up)
