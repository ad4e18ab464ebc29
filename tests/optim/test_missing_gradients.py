"""Norms of gradients that one rank lacks, as of experts without tokens there: no rank waits, and the norm is that of all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import Pool
from titan.optim.clipping import clip_gradients
from titan.optim.in_backward import OptimizerInBackward
from titan.parallel import build_mesh


def parameters() -> tuple:
    """Return two parameters of which each rank has a half, and rank 1 no gradient of the second."""
    mesh = build_mesh("cpu", dp_shard=2)["dp_shard"]
    both = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in "ab"]
    first, second = both
    first.grad = torch.full_like(first, 2.0)
    if dist.get_rank() == 0:
        second.grad = torch.full_like(second, 3.0)
    return first, second


EXPECTED = (4 * 2.0**2 + 2 * 3.0**2) ** 0.5


def clip(order: int) -> tuple[float, list[float]]:
    found = parameters()
    norm = clip_gradients(found[::order], max_norm=1.0)
    dist.barrier()
    gradients = [p.grad.to_local().tolist()[0] for p in found if p.grad is not None]
    return norm.item(), gradients


@pytest.mark.parametrize("order", [1, -1])
def test_clipping_counts_a_missing_gradient_as_zero(order: int, pool: Pool) -> None:
    (norm, both), (other, one) = pool.run(2, clip, order)
    assert norm == other == pytest.approx(EXPECTED)
    assert both == pytest.approx([2 / EXPECTED, 3 / EXPECTED], rel=1e-5)
    assert one == pytest.approx([2 / EXPECTED], rel=1e-5)


def finish(_: int) -> list[float]:
    found = parameters()
    early = OptimizerInBackward(torch.optim.SGD(found, lr=0.1))
    early.active = True
    norms = [
        early.finish().item(),
        early.finish().item(),
    ]  # the second step has no gradient at all
    dist.barrier()
    return norms


def test_updates_in_the_backward_pass_report_the_norm_of_all(pool: Pool) -> None:
    assert pool.run(2, finish, 0) == [[pytest.approx(EXPECTED), 0.0]] * 2
