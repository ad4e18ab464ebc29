"""FSDP units of one rank: the bits of torch's own way, with half of the bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

from tests.support.layouts import TRACED, ZERO_BUBBLE, Layout, fsdp, pp, schedule, train
from tests.support.operations import Watch
from tests.support.ranks import Pool
from titan.parallel import apply_fsdp, build_mesh
from titan.parallel.one_rank import stay_on_rank

EXPERTS: Any = {"model": ("qwen3", "tiny_moe"), "documents": False}
SPLIT_EXPERTS = (("expert_parallel_degree", 2),)
LAYOUTS = [
    Layout("one process"),
    Layout("three micro-batches", accumulation=4),
    Layout("tied", overrides=(("tied_embeddings", True),)),
    Layout("frozen", freeze=("tok_embeddings.*", "layers.0.*")),
    Layout("weights freed in between", settings=(("fsdp_reshard_after_forward", "always"),)),
    Layout("full AC", accumulation=2, recompute="full"),
    Layout("compiled", compiled=TRACED),
    Layout("parameters on the host", offload=True),
    Layout("float8", float8="tensorwise"),
    Layout(
        "optimizer in backward", optimizer=(("early_step_in_backward", True),), accumulation=2
    ),
    Layout("experts", accumulation=2, **EXPERTS),
    Layout("stages of one rank", pp(2), 2),
    Layout("stages of one rank, split backward pass", pp(2), settings=ZERO_BUBBLE),
    Layout("two stages a rank", pp(2), settings=schedule("Interleaved1F1B")),
    Layout("experts of one rank", fsdp(2), 2, settings=SPLIT_EXPERTS, **EXPERTS),
]


def equal_bits(layout: Layout, steps: int) -> list[str]:
    """Run on each rank: what differs between torch's way and ours in losses, norms, gradients and weights."""
    ours = train(layout, "bfloat16", steps)
    with patch("titan.parallel.fsdp.stay_on_rank") as left_out:
        torchs = train(layout, "bfloat16", steps)
    assert left_out.called
    wrong = [name for name in ("losses", "norms") if ours[name] != torchs[name]]
    for what in ("gradients", "weights"):
        assert ours[what].keys() == torchs[what].keys()
        wrong += [
            n for n, value in ours[what].items() if not torch.equal(value, torchs[what][n])
        ]
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def test_bits_are_those_of_torchs_way(layout: Layout, pool: Pool) -> None:
    for wrong in pool.run(layout.ranks, equal_bits, layout, 3):
        assert wrong == []


COPIES = ("_foreach_copy_", "_to_copy", "copy_", "chunk_cat", "clone", "reduce_scatter")


@pytest.mark.parametrize(("ours", "bytes_each"), [(True, 12), (False, 24)])
def test_bytes_that_a_step_copies_for_each_parameter(
    ours: bool, bytes_each: int, one_rank: None
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    options = {"param_dtype": torch.bfloat16, "reshard_after_forward": False}
    with nullcontext() if ours else patch("titan.parallel.fsdp.stay_on_rank"):
        apply_fsdp(
            model,
            mesh=build_mesh("cpu")["dp_shard"],
            blocks=[*model],
            gradients="sum",
            **options,
        )
    x = torch.randn(8, 64)
    model(x).sum().backward()  # the first pass allocates
    copied: list[int] = []

    def see(func: Any, args: Any, result: Any) -> None:
        """Count bytes read and written by operations that only copy or cast."""
        name = func.__name__
        if any(n in name for n in COPIES):
            flat = tree_leaves((args, result if "_to" in name else ()))
            copied.extend(t.nbytes for t in flat if isinstance(t, Tensor))

    with Watch(see):
        model(x).sum().backward()
    weights = sum(p.numel() for p in model.parameters())
    rest = sum(copied) - bytes_each * weights
    assert 0 <= rest <= 8 * 64 * 6  # the cast of the input, of 8 rows


@pytest.mark.parametrize("change", ["factor", "hook"])
def test_a_reduction_of_ones_own_is_torchs(change: str, one_rank: None) -> None:
    """A factor that divides gradients, or a hook on their sum, is not left out."""
    gradients = []
    for ours in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Linear(8, 8)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        if ours:
            stay_on_rank(model)
        if change == "factor":
            model.set_gradient_divide_factor(4.0)
        else:
            model.set_all_reduce_hook(lambda total: total.mul_(3))
        model.set_force_sum_reduction_for_comms(True)
        model(torch.ones(2, 8)).sum().backward()
        gradients.append(model.weight.grad.to_local())
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() != 2  # torch 2.13 divides twice by a factor on one rank


class OneSum(nn.Module):
    """A layer that adds two parameters: autograd gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 8))
        self.b = nn.Parameter(torch.randn(32))
        self.c = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.c.expand(8, 4).reshape(32), x.flatten()])
        return (self.a.view(-1) + self.b) * joined[:32] * joined[32:]


def test_gradients_share_no_memory(one_rank: None) -> None:
    """Where nothing is cast, a gradient of autograd would be the parameter's own, and clipping would scale two at once."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(OneSum())
        with nullcontext() if ours else patch("titan.parallel.fsdp.stay_on_rank"):
            apply_fsdp(
                model,
                mesh=build_mesh("cpu")["dp_shard"],
                blocks=[model[0]],
                gradients="sum",
            )
        x = torch.randn(4, 8)
        for _ in range(2):
            model(x).sum().backward()
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        assert len(grads) == 3
        if ours:
            assert len({g.untyped_storage().data_ptr() for g in grads}) == 3
            assert all(g.untyped_storage().nbytes() == g.nbytes for g in grads)
        for grad in grads:
            grad.mul_(0.5)
        found.append([grad.clone() for grad in grads])
    assert all(map(torch.equal, *found))
