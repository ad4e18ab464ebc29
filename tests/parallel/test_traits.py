"""Traits of modules: the functions of a block that are compiled, and the first and last modules of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from titan.parallel import apply_compile
from titan.parallel.stage_split import split_modules
from titan.parallel.traits import BlockTraits, ends_of


class Waiting(nn.Module):
    """A block that waits for the device between two matmuls, as one with experts does."""

    traits = BlockTraits(compiled=("inner.forward", "after"))

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.after(y) if y.sum().item() < 1e9 else y

    def after(self, y: Tensor) -> Tensor:
        return y.relu() * 2


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def test_the_named_functions_are_compiled_or_the_whole_block() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": Waiting(), "1": Plain()})
    x = torch.randn(3, 4)
    expected = [block(x) for block in model.layers.values()]
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        calls.append(
            " ".join(str(node.target) for node in graph.graph.nodes if "call" in node.op)
        )
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="traits_test")
    apply_compile(model, backend="traits_test", fullgraph=True)
    for block, y in zip(model.layers.values(), expected, strict=True):
        torch.testing.assert_close(block(x), y, rtol=0, atol=0)
    assert len(calls) == 3  # a whole Waiting would break its graph


def test_traits_of_a_child() -> None:
    inner = BlockTraits(
        compiled=("a", "b.c"), varying=frozenset({"b.c"}), recomputed=frozenset({"a"})
    )
    outer = BlockTraits(
        compiled=("own", "moe.a", "moe.b.c"),
        varying=frozenset({"moe.b.c"}),
        recomputed=frozenset({"moe.a"}),
    )
    assert inner.within("moe", "own") == outer


def test_a_family_names_its_ends() -> None:
    sizes = SimpleNamespace(first_modules=("patches", "context"), last_modules=("head",))
    assert ends_of(sizes).embedding == "patches"
    stages = split_modules(3, num_stages=2, ends=ends_of(sizes))
    assert stages == [["patches", "context", "layers.0", "layers.1"], ["layers.2", "head"]]
    usual = split_modules(1, num_stages=1, ends=ends_of(SimpleNamespace()))
    assert usual == [["tok_embeddings", "layers.0", "norm", "output"]]
