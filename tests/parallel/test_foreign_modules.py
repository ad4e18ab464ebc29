"""The data-parallel helpers on modules that are not like ours, against plain torch on one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.ranks import Pool, RankFailed
from titan.parallel import (
    apply_ac,
    apply_compile,
    apply_ddp,
    apply_fsdp,
    build_mesh,
    initialize,
    materialize,
    set_gradient_sync,
)

WIDTH, ROWS, PASSES = 8, 12, 3
Skips = tuple[Any, ...]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.tower = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tower: bool = True) -> Tensor:
        x = x + torch.tanh(self.a(x))
        return x + torch.tanh(self.tower(x)) if tower else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.other_head, self.never = nn.Linear(WIDTH, ROWS), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, *skips: Any) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if ("block", number) not in skips:
                x = block(x, tower=("tower", number) not in skips)
            if ("rest", number) in skips:
                break
        return (self.other_head if "head" in skips else self.head)(self.norm(x))


# What micro-batch k of a step leaves out.
USES: dict[str, Callable[[int], Skips]] = {
    "the first skips a block": lambda k: (("block", 1),) if k == 0 else (),
    "the last skips a block": lambda k: (("block", 1),) if k == PASSES - 1 else (),
    "one alone uses a block": lambda k: () if k == 1 else (("block", 2),),
    "each skips another block": lambda k: (("block", k),),
    "none uses a block": lambda k: (("block", 2),),
    "the last leaves early": lambda k: (("rest", 1),) if k == PASSES - 1 else (),
    "each skips another module": lambda k: (("tower", k), ("tower", 3)),
    "another head": lambda k: ("head",) if k == 1 else (),
}
# How gradients are accumulated: what `set_gradient_sync` gets in a micro-batch that is the last or not.
WAYS: dict[str, tuple[int, dict[str, Any], Callable[[bool], dict[str, Any]]]] = {
    "DDP": (2, {}, lambda last: {"enabled": last}),
    "FSDP, each": (2, {}, lambda last: {"enabled": True}),
    "FSDP, last": (2, {}, lambda last: {"enabled": last}),
    "FSDP, last, kept": (
        2,
        {"blocks_per_unit": 2},
        lambda last: {"enabled": last, "reshard": last},
    ),
    "HSDP, shards": (4, {}, lambda last: {"enabled": True, "all_reduce": last}),
    "HSDP, last": (4, {}, lambda last: {"enabled": last}),
}


def ids_of(step: int, k: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * k + rank)
    return torch.randint(ROWS, (2, 6), generator=generator)


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(
    model: nn.Module, use: str, ranks: range, sync: Callable[[bool], None] = lambda last: None
) -> list[dict[str, Tensor | None]]:
    """Train two steps; return the gradients of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    found = []
    for step in range(2):
        for k in range(PASSES):
            sync(k == PASSES - 1)
            for rank in ranks:
                out = model(ids_of(step, k, rank), *USES[use](k))
                nn.functional.cross_entropy(out.flatten(0, 1), torch.arange(12) % ROWS, reduction="sum").backward()  # fmt: skip
        found.append({n: g if g is None else g.clone() for n, p in model.named_parameters() for g in [whole(p.grad)]})  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return found


def on_ranks(way: str, uses: list[str]) -> list[list[dict[str, Tensor | None]]]:
    world, options, sync = WAYS[way]
    rank, found = dist.get_rank(), []
    for use in uses:
        torch.manual_seed(0)
        model = Model()
        units: Any = {
            "gradients": "sum",
            "blocks": nn.ModuleDict({str(n): b for n, b in enumerate(model.blocks)}),
            "first": [model.embed],
            "last": [model.norm, model.head],
        }
        if way == "DDP":
            apply_ddp(model, mesh=build_mesh("cpu", dp_replicate=2)["dp_replicate"], **units)
        elif world == 4:
            mesh = build_mesh("cpu", dp_replicate=2, dp_shard=2)["dp_replicate", "dp_shard"]
            apply_fsdp(model, mesh=mesh, **units)
        else:
            apply_fsdp(
                model, mesh=build_mesh("cpu", dp_shard=2)["dp_shard"], **units, **options
            )

        def set_sync(last: bool, model: nn.Module = model) -> None:
            set_gradient_sync(model, **sync(last))

        found.append(gradients(model, use, range(rank, rank + 1), set_sync))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_not_every_micro_batch_uses(way: str, pool: Pool) -> None:
    world = WAYS[way][0]
    results = pool.run(world, on_ranks, way, [*USES])
    for place, use in enumerate(USES):
        torch.manual_seed(0)
        expected = gradients(Model(), use, range(world))
        for result in results:
            for mine, reference in zip(result[place], expected, strict=True):
                for name, gradient in reference.items():
                    where = f"{use}, {name}"
                    if gradient is None:  # as in torch, so that no optimizer decays the weight
                        assert mine[name] is None, where
                    else:
                        torch.testing.assert_close(
                            mine[name], gradient, rtol=1e-5, atol=1e-5, msg=where
                        )


# ---- shared parameters ---------------------------------------------------------------------------


def tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_blocks(model: Any) -> None:
    model.blocks[2].a.weight = model.blocks[0].a.weight


def share_module(model: Any) -> None:
    model.blocks[2].a = model.blocks[0].a


def tie_in_block(model: Any) -> None:
    model.blocks[1].a.weight = model.blocks[1].tower.weight


def tie_norm(model: Any) -> None:
    model.norm.bias = model.blocks[1].a.bias


BOTH = r"blocks\.0\.a\.weight and blocks\.2\.a\.weight are one parameter"
SHARED: list[tuple[Callable[[Any], None], tuple[str, ...], tuple[str, ...], str]] = [
    (tie, (), (), ""),
    (tie, ("embed",), (), ""),
    (tie, (), ("norm", "head"), ""),
    (tie, ("embed",), ("norm", "head"), ""),
    (tie_in_block, ("embed",), ("norm", "head"), ""),
    (tie_blocks, (), (), BOTH),
    (share_module, (), (), BOTH),
    (tie_norm, (), ("norm", "head"), r"blocks\.1\.a\.bias and norm\.bias are one parameter"),
]


def losses(model: nn.Module, ranks: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        values = [model(ids_of(step, 0, rank)).square().sum() for rank in ranks]
        sum(values).backward()  # pyrefly: ignore[missing-attribute]
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(value.item() for value in values))
    return found


def shared_losses(row: int, how: str, meta: bool) -> tuple[list[float], int]:
    share, first, last, _ = SHARED[row]
    torch.manual_seed(0)
    source = Model()
    share(source)
    model = source
    if meta:
        with torch.device("meta"):
            model = Model()
        share(model)
    units: Any = {
        "gradients": "sum",
        "blocks": model.blocks.children(),
        "first": [getattr(model, n) for n in first],
        "last": [getattr(model, n) for n in last],
    }
    if how == "DDP":
        apply_ddp(model, mesh=build_mesh("cpu", dp_replicate=2)["dp_replicate"], **units)
    else:
        apply_fsdp(model, mesh=build_mesh("cpu", dp_shard=2)["dp_shard"], **units)
    if meta:
        materialize(model, device="cpu")
        weights = dict(source.named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                value: Tensor = weights[name]
                if isinstance(p, DTensor):
                    value = distribute_tensor(
                        value, p.device_mesh, p.placements, src_data_rank=None
                    )
                p.copy_(value)
    total = torch.tensor(losses(model, range(dist.get_rank(), dist.get_rank() + 1)))
    dist.all_reduce(total)
    return total.tolist(), len([*model.parameters()])


@pytest.mark.parametrize("row", range(len(SHARED)))
def test_a_parameter_in_two_places(row: int, pool: Pool) -> None:
    share, _, _, message = SHARED[row]
    torch.manual_seed(0)
    model = Model()
    share(model)
    expected = losses(model, range(2))
    for how, meta in (("FSDP", False), ("DDP", True)) if message else (("FSDP", False), ("FSDP", True), ("DDP", False), ("DDP", True)):  # fmt: skip
        if message:
            with pytest.raises(RankFailed, match=message):
                pool.run(2, shared_losses, row, how, meta)
            continue
        for values, count in pool.run(2, shared_losses, row, how, meta):
            assert values == pytest.approx(expected, rel=1e-5), (how, meta)
            assert count == len([*model.parameters()])


# ---- what is refused -----------------------------------------------------------------------------

ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), r"module 'blocks.0.odd' \(Embedding\) shortens"),
    "max_norm of a bag": (lambda: nn.EmbeddingBag(4, 4, max_norm=1.0), r"\(EmbeddingBag\) shortens"),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), "makes sparse gradients"),
    "frequencies": (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "how often an id is"),
    "BatchNorm": (lambda: nn.BatchNorm1d(4), "takes its statistics from this rank's batch"),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), "its statistics"),
    "lazy": (lambda: nn.LazyLinear(4), "parameter 'blocks.0.odd.weight' gets its shape"),
    "complex": (lambda: parameter(torch.ones(4, dtype=torch.complex64)), "'blocks.0.odd.0' is complex"),
    "one number": (lambda: parameter(torch.tensor(1.0)), "is a single number"),
    "not contiguous": (lambda: parameter(torch.ones(4, 3).t()), "is not contiguous"),
    "another dtype": (lambda: parameter(torch.ones(4, dtype=torch.float64)), "one FSDP unit reduces both"),
}  # fmt: skip


def parameter(value: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(value)])


def refusals(how: str) -> dict[str, str]:
    found = {}
    for name, (make, _) in ODD.items():
        model = Model()
        model.blocks[0].odd = make()
        try:
            if how == "DDP":
                apply_ddp(
                    model,
                    mesh=build_mesh("cpu", dp_replicate=2)["dp_replicate"],
                    blocks=model.blocks.children(),
                    gradients="sum",
                )
            else:
                apply_fsdp(
                    model,
                    mesh=build_mesh("cpu", dp_shard=2)["dp_shard"],
                    blocks=model.blocks.children(),
                    gradients="sum",
                )
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("how", ["FSDP", "DDP"])
def test_other_numbers_than_one_process_are_refused_by_name(how: str, pool: Pool) -> None:
    for found in pool.run(2, refusals, how):
        for name, (_, message) in ODD.items():
            assert re.search(message, found[name]), found[name]


class Scaled(nn.Embedding):
    """Its gradient needs the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight * self.weight)


def hooked() -> nn.Embedding:
    return torch.nn.utils.weight_norm(nn.Embedding(ROWS, WIDTH))


def normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Embedding(ROWS, WIDTH))


EMBEDDINGS: list[Callable[[], nn.Module]] = [lambda: Scaled(ROWS, WIDTH), hooked, normed]


def with_embedding(number: int) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model: Any = Model()
    model.embed = EMBEDDINGS[number]()
    mesh = build_mesh("cpu", dp_shard=2)["dp_shard"]
    apply_fsdp(
        model, mesh=mesh, blocks=model.blocks.children(), first=[model.embed], gradients="sum"
    )
    return gradients(
        model, "the first skips a block", range(dist.get_rank(), dist.get_rank() + 1)
    )


@pytest.mark.parametrize("number", range(len(EMBEDDINGS)))
def test_an_embedding_that_computes_with_its_weight(number: int, pool: Pool) -> None:
    """FSDP leaves an embedding's weight scattered in the backward pass, which these need."""
    torch.manual_seed(0)
    model: Any = Model()
    model.embed = EMBEDDINGS[number]()
    [expected, _] = gradients(model, "the first skips a block", range(2))
    for found, _ in pool.run(2, with_embedding, number):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_dropout_without_the_random_state_is_refused_by_name() -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))])}
    )
    for helper in (apply_ac, apply_compile):
        with pytest.raises(ValueError, match=r"module 'layers\.0\.1' draws random numbers"):
            helper(model, preserve_rng_state=False)
    attention = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.MultiheadAttention(4, 2, dropout=0.1)])}
    )
    with pytest.raises(ValueError, match=r"module 'layers\.0' draws"):
        apply_ac(attention, preserve_rng_state=False)
    quiet = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))])}
    )
    apply_ac(quiet, preserve_rng_state=False)


def test_the_row_of_padding_begins_at_zero() -> None:
    model: Any = nn.ModuleDict(
        {"a": nn.Embedding(5, 4, padding_idx=2), "b": nn.Embedding(5, 4)}
    )
    initialize(model, seed=0, std_of=lambda name: 0.1)
    assert model["a"].weight[2].eq(0).all() and model["a"].weight[[0, 1, 3, 4]].ne(0).all()
    assert model["b"].weight.ne(0).all()
