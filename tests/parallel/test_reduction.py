"""`gradients="mean"` against torch's fully_shard, in a trainer that was written for it; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.ranks import Pool
from tests.support.tables import table
from titan.parallel import (
    apply_ddp,
    apply_ep,
    apply_fsdp,
    build_mesh,
    build_sparse_mesh,
    set_gradient_sync,
    submesh,
)

WIDTH, STEPS, NUM_EXPERTS = 6, 4, 4


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(3)
        )
        self.output = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x)


def losses(ours: str, accumulates: bool) -> list[float]:
    """Run on each rank: a loop as in torch's tutorial of FSDP2. "": torch's own fully_shard."""
    torch.manual_seed(0)
    model: Any = Transformer()
    world = dist.get_world_size()
    if ours == "ddp":
        mesh = build_mesh("cpu", dp_replicate=world)["dp_replicate"]
        apply_ddp(model, mesh=mesh, blocks=model.layers, gradients="mean")
    elif ours == "hsdp":
        mesh = build_mesh("cpu", dp_replicate=2, dp_shard=2)["dp_replicate", "dp_shard"]
        apply_fsdp(model, mesh=mesh, blocks=model.layers, gradients="mean")
    elif ours:
        mesh = build_mesh("cpu", dp_shard=world)["dp_shard"]
        dtype = torch.bfloat16 if ours == "bfloat16" else None
        apply_fsdp(model, mesh=mesh, blocks=model.layers, gradients="mean", param_dtype=dtype)
    else:
        mesh = build_mesh("cpu", dp_shard=world)["dp_shard"]
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        for part in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + part)
            ids = torch.randint(16, (2, 5), generator=generator)
            if ours and accumulates:
                set_gradient_sync(model, part == 1)
            elif accumulates:
                model.set_requires_gradient_sync(part == 1)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten()
            )
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_trainer_for_fully_shard_has_the_losses_of_torch(world: int, pool: Pool) -> None:
    for accumulates in (False, True):
        expected = pool.run(world, losses, "", accumulates)
        assert expected[0][0] != expected[0][-1]
        for ours in ("fsdp", *["ddp"] * (world > 1), *["hsdp"] * (world == 4)):
            for mine, torchs in zip(
                pool.run(world, losses, ours, accumulates), expected, strict=True
            ):
                assert mine == pytest.approx(torchs, rel=1e-6), (ours, accumulates)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        # No gradient, not even zeros, without tokens.
        parts = zip(tokens.split(counts.tolist()), self.w, strict=True)
        return torch.cat([x @ w for x, w in parts if len(x)] or [tokens])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.dispatcher: Any = lambda tokens, counts, experts: experts(tokens, counts)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=NUM_EXPERTS)
        return self.dispatcher(x[order], counts, self.experts)[order.argsort()]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.mixture = nn.Linear(WIDTH, WIDTH), Mixture()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mixture(self.stem(x), ids)


def expert_gradients(degrees: dict[str, int], ep: int, used: int) -> dict[str, Tensor]:
    """Run on each rank: gradients of the mean over ranks, with tokens for the first `used` experts alone."""
    model, generator = Net(), torch.Generator().manual_seed(5)
    x, ids = torch.randn(16, WIDTH, generator=generator), torch.arange(16) % used
    world, rank = dist.get_world_size(), dist.get_rank()
    if world > 1:
        mesh = build_mesh("cpu", **degrees)
        sparse = build_sparse_mesh(mesh, ep=ep)
        names = sparse.mesh_dim_names or ()
        axes = tuple(axis for axis in ("dp_replicate", "efsdp") if axis in names)
        if ep > 1:
            # pyrefly: ignore[bad-argument-type]
            apply_ep(model, mesh=submesh(sparse, "ep"), moe_type=Mixture)
        own: Any = {model.mixture.experts: sparse[axes]}
        data = mesh[tuple(degrees)]
        apply_fsdp(model, mesh=data, blocks=[model.mixture], own_mesh=own, gradients="mean")
        x, ids = x.chunk(world)[rank], ids.chunk(world)[rank]
    model(x, ids).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


# ({"dp_shard": 2}, 2, 4): each expert on one rank
# ({"dp_shard": 4}, 2, 4): each on two
# ({"dp_replicate": 2, "dp_shard": 2}, 2, 4): two replicas of one rank
# ({"dp_shard": 4}, 2, 2): two ranks without a token, and without a gradient
MESHES = table(__file__, "meshes")


@pytest.mark.parametrize(("degrees", "ep", "used"), MESHES)
def test_experts_average_over_all_ranks_that_sent_tokens(
    degrees: dict[str, int], ep: int, used: int, pool: Pool
) -> None:
    [alone] = pool.run(1, expert_gradients, degrees, ep, used)
    world = 2 if degrees == {"dp_shard": 2} else 4
    for found in pool.run(world, expert_gradients, degrees, ep, used):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, alone[name], msg=f"{degrees} {name}")
        assert "stem.weight" in found


def double_gradients(kind: str) -> tuple[list[Tensor], str]:
    """Run on each rank: gradients of an fp64 model, and the error of a gradient penalty."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2)).double(),
        torch.randn(4, 3),
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    options: Any = {"blocks": list(model), "gradients": "mean"}
    if kind:
        axis = "dp_replicate" if kind == "ddp" else "dp_shard"
        helper = apply_ddp if kind == "ddp" else apply_fsdp
        helper(model, mesh=build_mesh("cpu", **{axis: world})[axis], **options)
    own = x.double()[rank::world].requires_grad_()
    model(own).exp().mean().backward()
    grads: Any = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    try:
        torch.autograd.grad(model(own).sum(), own, create_graph=True)[0].sum().backward()
    except ValueError as error:
        return grads, str(error)
    return grads, ""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_fp64_is_reduced_in_fp64_and_second_derivatives_are_refused(
    kind: str, pool: Pool
) -> None:
    [(expected, said)] = pool.run(1, double_gradients, "")
    assert not said
    for found, said in pool.run(2, double_gradients, kind):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
        assert "create_graph=True, as for a gradient penalty" in said


@pytest.mark.parametrize("helper", [apply_fsdp, apply_ddp])
def test_the_error_says_which_one_a_trainer_needs(helper: Any) -> None:
    for options in ({}, {"gradients": "average"}):
        with pytest.raises(TypeError, match='"mean" for a trainer that was written for torch'):
            helper(nn.Linear(2, 2), mesh=None, blocks=[], **options)
