"""Newton-Schulz and Muon against torch's, and the exchange of matrices against slicing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import Pool
from titan.config.schema import MuonSection
from titan.contrib.muon import optimizer as muon
from titan.contrib.muon.optimizer import (
    Exchange,
    collect,
    cuts_of,
    give_back,
    newton_schulz,
)
from titan.optim.optimizers import build_optimizer
from titan.parallel import build_mesh


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_newton_schulz_evens_singular_values_and_keeps_the_vectors(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    result = newton_schulz(matrices, steps=5)
    for x, y in zip(matrices, result, strict=True):
        u, s, vt = torch.linalg.svd(x, full_matrices=False)
        values = u.T @ y @ vt.T  # diagonal, where the singular vectors are the same
        torch.testing.assert_close(values, torch.diag(values.diag()), rtol=0, atol=1e-9)
        kept = s / s.norm() > 0.01  # smaller ones need more steps
        assert ((values.diag() > 0.6) & (values.diag() < 1.25))[kept].all()


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(newton_schulz(torch.zeros(1, 4, 8), steps=5), torch.zeros(1, 4, 8))


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_s_muon(nesterov: bool) -> None:
    """Both in bf16, with the same products. torch's takes one parameter at a time, ours too on one process."""
    generator = torch.Generator().manual_seed(0)
    ours = {
        f"layers.0.{name}": nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in {"a": (32, 48), "b": (48, 32), "c": (16, 16)}.items()
    }
    vector = nn.Parameter(torch.ones(8))
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    keys: Any = {"nesterov": nesterov, "ns_dtype": "bfloat16"}
    section = MuonSection(lr=0.01, weight_decay=0.1, **keys)
    optimizer = build_optimizer(section, [*ours.items(), ("norm.weight", vector)])
    reference = torch.optim.Muon(
        theirs.values(),
        lr=0.01,
        nesterov=nesterov,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in ours.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_who_gets_what() -> None:
    """Matrices of the blocks, and AdamW's two groups for the rest, each with a peak learning rate of its own."""
    shapes = {
        "tok_embeddings.weight": (32, 8),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.0.attention_norm.weight": (8,),
        "output.weight": (32, 8),
    }
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = build_optimizer(MuonSection(lr=0.02, adam_lr=0.003), named.items())
    names = {id(p): name for name, p in named.items()}
    matrices, decayed, vectors = (
        [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
    )
    assert matrices == ["layers.0.attention.wq.weight"]
    assert decayed == ["tok_embeddings.weight", "output.weight"]
    assert vectors == ["layers.0.attention_norm.weight"]
    assert [g["initial_lr"] for g in optimizer.param_groups] == [0.02, 0.003, 0.003]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()  # a learning rate set in the groups is that of both parts
    assert all(torch.equal(p, torch.ones_like(p)) for p in named.values())


def test_goes_on_from_a_state_dict() -> None:
    """Also the others, and with learning rates that are set afterwards."""
    results = []
    for resumed in (False, True):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((8, 8), (32, 8))]
        named = list(zip(("layers.0.w.weight", "output.weight"), parameters, strict=True))
        section = MuonSection(lr=0.02)
        optimizer = build_optimizer(section, named)
        for step in range(6):
            if resumed and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = build_optimizer(section, named)
                optimizer.load_state_dict(saved)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def arrived(exchange: Exchange) -> Tensor:
    """What an exchange returns in the end."""
    result: list[Tensor] = []

    def run() -> Iterator[None]:
        result.append((yield from exchange))

    list(run())
    return result[0]


def exchange(shape: tuple[int, int], placements: str, num: int) -> list[Tensor]:
    """How whole each rank's matrices are, and whether its shards come back as they were."""
    mesh = build_mesh("cpu", dp_shard=2, tp=2)
    places = [{"r": Replicate(), "0": Shard(0), "1": Shard(1)}[p] for p in placements]
    matrices = [
        torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) + 1000 * i
        for i in range(num)
    ]
    shards = [distribute_tensor(m, mesh, places, src_data_rank=None) for m in matrices]
    x = before = torch.stack([s.to_local() for s in shards])
    counts = []
    for cut in cuts_of(shards[0]):
        n, ranks = len(x), cut.group.size()
        counts.append([n // ranks + (r < n % ranks) for r in range(ranks)])
        x = arrived(collect(x, cut, counts=counts[-1]))
    whole = x.clone()
    for cut in reversed(cuts_of(shards[0])):
        x = arrived(give_back(x, cut, counts=counts.pop()))
    assert torch.equal(x, before)
    return list(whole)


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 7)])  # even, uneven, and ranks with none
@pytest.mark.parametrize("placements", ["00", "01", "10", "0r", "r1"])
def test_every_matrix_is_whole_on_one_rank(
    shape: tuple[int, int], placements: str, pool: Pool
) -> None:
    for num in (1, 3, 4):
        whole = [m for found in pool.run(4, exchange, shape, placements, num) for m in found]
        copies = 2 if "r" in placements else 1  # replicas do the same work
        assert len(whole) == num * copies
        firsts = sorted(m[0, 0].item() for m in whole)
        assert firsts == sorted([1000.0 * i for i in range(num)] * copies)
        for m in whole:
            expected = torch.arange(shape[0] * shape[1]).view(shape) + m[0, 0]
            assert torch.equal(m, expected)


def shares(kinds: list[tuple[int, int]]) -> int:
    """How many matrices this rank orthogonalizes of some kinds of three each."""
    mesh = build_mesh("cpu", dp_shard=4)
    named = {
        f"layers.{i}.{shape}": nn.Parameter(
            distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None)
        )
        for i in range(3)
        for shape in kinds
    }
    named["norm.weight"] = nn.Parameter(torch.ones(4))
    optimizer = build_optimizer(MuonSection(), named.items())
    for p in named.values():
        p.grad = torch.ones_like(p)
    done: list[int] = []
    whole = muon.newton_schulz
    muon.newton_schulz = lambda x_NRC, **options: (
        done.append(len(x_NRC)) or whole(x_NRC, **options)
    )
    try:
        optimizer.step()
    finally:
        muon.newton_schulz = whole
    assert len(done) == len(kinds)  # a batch for each
    return sum(done)


def test_ranks_take_turns(pool: Pool) -> None:
    """Twelve matrices, three of a kind, are three for each of four ranks: not four for the first three."""
    kinds = [(4, 8), (8, 8), (8, 16), (16, 16)]
    assert pool.run(4, shares, kinds) == [3, 3, 3, 3]


def update_twice(sharded: bool) -> dict[str, Tensor]:
    """Weights of three layers of each kind after two updates. FSDP is joined first where TP cut the same dimension, last elsewhere."""
    torch.manual_seed(0)
    kinds = {"wide": (8, 16), "col": (8, 8), "row": (8, 8)}
    model = nn.Sequential(  # pyrefly: ignore[no-matching-overload]
        OrderedDict(
            (f"{name}{i}", nn.Linear(*sizes, bias=False))
            for i in range(3)
            for name, sizes in kinds.items()
        )
    )
    if sharded:
        mesh = build_mesh("cpu", dp_shard=2, tp=2)
        names = dict(model.named_children())
        plan: dict[str, ParallelStyle] = {
            n: RowwiseParallel() if "row" in n else ColwiseParallel() for n in names
        }
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp_shard"])
    named = [(f"layers.{n}", p) for n, p in model.named_parameters()]
    rest = ("norm.weight", nn.Parameter(torch.ones(4)))
    optimizer = build_optimizer(MuonSection(lr=0.1), [*named, rest])
    for _ in range(2):
        for _, p in named:
            p.grad = p.detach().clone().pow_(3)  # of the weight, so it is laid out like it
        optimizer.step()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named}


def test_groups_that_cut_in_another_order_agree(pool: Pool) -> None:
    expected = update_twice(False)
    for weights in pool.run(4, update_twice, True):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
