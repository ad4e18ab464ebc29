"""Tensor parallelism by `apply_tp` alone, on a model of the test's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pool import RankFailed
from titan.parallel import apply_compile, apply_fsdp, apply_tp, build_mesh, initialize, materialize

PLAN = {
    "embed": "vocab_embedding",
    "blocks.*.norm": "sequence",
    "blocks.*.enter": "gather_sequence",
    "blocks.*.up": "columns",
    "blocks.*.value": "kv_columns",
    "blocks.*.down": "rows",
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


def _gradients(tp: int, compiled: bool) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    mesh = build_mesh("cpu", tp=tp, dp_shard=1)
    with torch.device("meta"):
        model = Net()
    if tp > 1:
        apply_tp(model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=2, loss_parallel=False)
    if compiled:
        apply_compile(model, container="blocks", backend="aot_eager")
    apply_fsdp(model, mesh=mesh["dp_shard"], blocks=model.blocks)
    materialize(model, device="cpu")
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.3)
    tokens = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(0))
    model(tokens).square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def test_an_embedding_before_compiled_blocks_gets_its_gradient(pool) -> None:
    (expected,) = pool.run(1, _gradients, 1, False)
    for found in pool.run(2, _gradients, 2, True):
        assert found.keys() == expected.keys() and expected["embed.weight"].norm() > 0.1
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _still_trained() -> list[str]:
    mesh = build_mesh("cpu", tp=2, dp_shard=1)
    found = []
    for output_in_loss in (False, True):
        with torch.device("meta"):
            model = Net().requires_grad_(False)
        apply_tp(model, mesh=mesh["tp"], plan=PLAN, num_kv_heads=1, output_in_loss=output_in_loss)
        found += [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return found


def test_frozen_parameters_stay_frozen(pool) -> None:
    """Of every style."""
    assert pool.run(2, _still_trained) == [[], []]


def _split(change: dict[str, str], heads: int, length: int) -> None:
    mesh = build_mesh("cpu", tp=2, dp_shard=1)
    model = Net()
    model.blocks[0].up = nn.Linear(8, 11)
    apply_tp(model, mesh=mesh["tp"], plan=PLAN | change, num_kv_heads=heads)
    model.embed(torch.zeros(1, length, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "heads", "length", "message"),
    [
        ({}, 3, 4, "3 key/value heads do not divide by 2 ranks"),
        ({}, 2, 4, r"the 11 outputs of blocks\.0\.up do not divide by 2 ranks"),
        ({"blocks.0.up": "rows", "blocks.*.up": "rows"}, 2, 5, "a sequence of 5 tokens does not"),
        ({"encoder.*": "colums"}, 2, 4, "unknown style colums; there are vocab_embedding, "),
    ],
)
def test_what_does_not_divide_is_refused(pool, change, heads, length, message) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, _split, change, heads, length)
