"""The check that async TP's rewrite fires, under a fake process group; and its numbers, on two gloo ranks (slow).

The rewrite is for NCCL and CUDA. Here torch is told that NCCL is there and given its own fallbacks as CPU kernels.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import Pool
from titan.parallel import apply_tp, build_mesh, initialize, materialize
from titan.parallel.async_tp import Rewrites, enable_async_tp
from titan.parallel.compile import apply_compile


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.gate = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(32), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


PLAN = {
    "layers.*.norm": "sequence",
    "layers.*.inner": "gather_input",
    "layers.*.inner.up": "colwise",
    "layers.*.inner.gate": "colwise",
    "layers.*.inner.down": "rowwise",
}


def build(*, compiled: bool) -> tuple[nn.Module, Rewrites | None]:
    mesh = build_mesh("cpu", tp=2)["tp"]
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Block()})})
    apply_tp(model, mesh=mesh, plan=PLAN, num_kv_heads=2)
    rewrites = enable_async_tp(mesh.get_group()) if compiled else None
    if compiled:
        apply_compile(model)
    materialize(model, device="cpu")
    initialize(model, seed=0, std_of=lambda name: None if "norm" in name else 0.2)
    return model, rewrites


def run(model: Any) -> list[Any]:
    """Output, gradient of the input and of the weights, of this rank."""
    block = model.get_submodule("layers.0")
    # Two sequences: torch 2.13 does not recognise the all-gather of a batch of one (docs/log.md).
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    x.requires_grad_()
    output = block(x)
    output.square().sum().backward()
    gradients = [p.grad.to_local() for p in model.parameters()]
    return [output.detach(), x.grad, *gradients]


def pretend() -> Any:
    """The contexts under which the rewrite runs on a CPU."""
    from torch.distributed import _symmetric_memory as symmetric

    library = torch.library.Library("symm_mem", "IMPL")
    gather, scatter = (
        "_fused_all_gather_matmul_fallback",
        "_fused_matmul_reduce_scatter_fallback",
    )
    library.impl("fused_all_gather_matmul", getattr(symmetric, gather), "CPU")
    library.impl("fused_matmul_reduce_scatter", getattr(symmetric, scatter), "CPU")
    stack = __import__("contextlib").ExitStack()
    stack.enter_context(mock.patch.object(dist, "is_nccl_available", lambda: True))
    stack.enter_context(symmetric._test_mode())
    stack.enter_context(mock.patch("torch._inductor.config.fx_graph_cache", False))
    stack.callback(library._destroy)
    return stack


def rewrites_on_a_fake_group() -> Rewrites | None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pretend():
        model, rewrites = build(compiled=True)
        run(model)
    return rewrites


def test_the_check_sees_what_was_rewritten(pool: Pool) -> None:
    """Forward: the all-gather feeds two products, the reduce-scatter follows one. Backward: the gathering of the output's
    gradient is fused; the reduce-scatter of a sum of two products is not, and torch's pass leaves it."""
    (rewrites,) = pool.run(1, rewrites_on_a_fake_group)
    assert rewrites == Rewrites(
        num_graphs=2,
        all_gathers=2,
        reduce_scatters=2,
        fused_all_gathers=2,
        fused_reduce_scatters=1,
    )
    assert "2 of 2 all-gathers and 1 of 2 reduce-scatters" in str(rewrites)


def test_what_was_not_compiled_is_said() -> None:
    assert not Rewrites().fired and "came from the compiler's cache" in str(Rewrites())
    assert not Rewrites(num_graphs=2, all_gathers=2).fired


def compiled_and_not() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plain, _ = build(compiled=False)
    expected = run(plain)
    with pretend():
        model, rewrites = build(compiled=True)
        result = run(model)
    assert rewrites is not None and rewrites.fired
    return result, expected


@pytest.mark.slow
def test_the_rewritten_block_computes_the_same(pool: Pool) -> None:
    for result, expected in pool.run(2, compiled_and_not):
        for a, b in zip(result, expected, strict=True):
            assert (a - b).norm() / b.norm() < 2e-6
