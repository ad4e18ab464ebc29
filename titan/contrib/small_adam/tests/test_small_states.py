"""Moments in 8 bits and bf16, stochastic rounding: against torch, torchao, and the same numbers in every layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import Pool
from titan.config.schema import (
    AdamSection,
    AdamW8bitSection,
    AdamWSection,
    MuonSection,
    OptimizerSection,
)
from titan.contrib.small_adam.optimizer import SmallAdam, block_size
from titan.optim.optimizers import build_optimizer
from titan.optim.rounding import RoundingSeeds
from titan.parallel import build_mesh


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """A matrix of blocks of 256, one of smaller blocks and a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (6, 2048), "narrow": (10, 64), "vector": (64,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(named.values()):
        generator = torch.Generator().manual_seed(100 * step + number)
        # Over a decade or two, as gradients are.
        grad = torch.randn(parameter.shape, generator=generator)
        grad = (grad * 10 ** (0.5 * torch.randn(parameter.shape, generator=generator))).to(
            parameter.dtype
        )
        if isinstance(parameter, DTensor):
            placed = parameter.device_mesh, parameter.placements
            grad = distribute_tensor(grad, *placed, src_data_rank=None)
        parameter.grad = grad


def run(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], steps: int = 10
) -> None:
    for step in range(steps):
        set_gradients(named, step)
        optimizer.step()


def section(kind: type[OptimizerSection], **options: Any) -> OptimizerSection:
    return kind.model_validate({"lr": 0.01, "implementation": "for-loop"} | options)


# ---- moments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdamWSection, AdamSection])
def test_in_fp32_it_is_torch_s(kind: type[OptimizerSection]) -> None:
    ours, theirs = parameters(), parameters()
    reference = build_optimizer(section(kind, weight_decay=0.1), theirs.items())
    assert isinstance(reference, torch.optim.Adam)
    compact = SmallAdam(
        [{**group, "params": [ours[n] for n, p in theirs.items() if _in(p, group)]}
         for group in reference.param_groups],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=torch.float32,
        decoupled=kind is AdamWSection,
    )  # fmt: skip
    run(reference, theirs)
    run(compact, ours)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def _in(parameter: Tensor, group: dict[str, Any]) -> bool:
    return any(parameter is p for p in group["params"])


def test_bf16_moments_are_rounded_and_nothing_else() -> None:
    """One step from zero is exact: rounding comes after the update."""
    ours, theirs = parameters(), parameters()
    small = build_optimizer(section(AdamWSection, state_dtype="bfloat16"), ours.items())
    exact = build_optimizer(section(AdamWSection), theirs.items())
    run(small, ours, steps=1)
    run(exact, theirs, steps=1)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)
        for moment in ("exp_avg", "exp_avg_sq"):
            kept = small.state[ours[name]][moment]
            torch.testing.assert_close(
                kept, exact.state[theirs[name]][moment].bfloat16(), rtol=0, atol=0
            )
    run(small, ours)
    run(exact, theirs)
    for name in ours:
        apart = (ours[name] - theirs[name]).abs()
        assert 0 < apart.mean() < 3e-4  # of eleven updates of 0.01


def test_eight_bits_are_torchao_s(eager: None) -> None:
    """Of the matrix whose rows are whole blocks of 256, as torchao cuts them; it keeps small ones in fp32."""
    torchao = pytest.importorskip("torchao.optim")
    ours, theirs = {"wide": parameters()["wide"]}, {"wide": parameters()["wide"]}
    compact = build_optimizer(section(AdamW8bitSection), ours.items())
    reference = torchao.AdamW8bit(
        theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    run(compact, ours)
    run(reference, theirs)
    apart = (ours["wide"] - theirs["wide"]).abs()
    assert (apart > 1e-6).float().mean() < 1e-3 and apart.max() < 1e-4  # of ten updates of 0.01
    state, expected = compact.state[ours["wide"]], reference.state[theirs["wide"]]
    for moment in ("exp_avg", "exp_avg_sq"):
        differ = state[f"{moment}_codes"] != expected[moment].codes
        assert differ.float().mean() < 1e-3  # a value in the middle between two levels
        scale = expected[moment].scale.view(6, 8)
        torch.testing.assert_close(state[f"{moment}_scale"], scale, rtol=1e-5, atol=0)


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its step."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_size_of_blocks() -> None:
    assert block_size((4096, 4096)) == block_size((4096, 14336)) == 256
    assert block_size((3072, 3072)) == 128  # an eighth of a row is 384
    assert block_size((64, 64)) == 8
    # Not worth a scale: a vector, an eighth of 4, a row that does not part into eight.
    assert block_size((4096,)) == block_size((8, 32)) == block_size((8, 100)) == 0


def test_memory_of_eight_bits() -> None:
    named = parameters()
    optimizer = build_optimizer(section(AdamW8bitSection), named.items())
    run(optimizer, named, steps=1)
    kept = {n: sum(t.nbytes for t in optimizer.state[p].values()) for n, p in named.items()}
    assert kept["wide"] == 6 * 2048 * 2 + 6 * 8 * 4 * 2 + 4
    assert kept["narrow"] == 10 * 64 * 2 + 10 * 8 * 4 * 2 + 4
    assert kept["vector"] == 64 * 4 * 2 + 4


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_state_dicts_keep_precision(weights: torch.dtype, moments: torch.dtype) -> None:
    def build() -> SmallAdam:
        named = parameters(weights)
        return SmallAdam(
            named.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, state_dtype=moments
        )

    saving, loading = build(), build()
    run(saving, {str(i): p for i, p in enumerate(saving.param_groups[0]["params"])}, steps=2)
    saved = saving.state_dict()
    loading.load_state_dict(copy.deepcopy(saved))
    loaded = loading.state_dict()
    for number, state in saved["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(loaded["state"][number][name], value, rtol=0, atol=0)


def test_a_closure_is_called() -> None:
    """As torch's optimizers do: with gradients on, before the update, and its loss is returned."""
    weight, vector = (nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,)))
    small = SmallAdam([vector], lr=0.1, betas=(0.9, 0.95), eps=1e-8, state_dtype=torch.float32)
    named = {"layers.0.weight": weight, "vector": vector}
    optimizer = build_optimizer(MuonSection(lr=0.1), named.items())

    def closure() -> Tensor:
        loss = (weight @ vector).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16  # pyrefly: ignore[no-matching-overload]
    assert (weight != 1).any() and (vector != 1).all()
    assert small.step(lambda: 5) == 5


# ---- stochastic rounding ---------------------------------------------------------------------


def _round(
    value: float, *, count: int, step: int = 0, seed: int = 0, name: str = "w"
) -> Tensor:
    """A bf16 weight of 0 after an update to `value`: the gradient's sign times the rate."""
    weight = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))
    optimizer = SmallAdam(
        [weight],
        lr=abs(value),
        betas=(0.0, 0.0),
        eps=0.0,
        state_dtype=torch.float32,
        seeds=RoundingSeeds({name: weight}, seed=seed),
    )
    optimizer.init_state(weight)
    optimizer.state[weight]["step"].fill_(step)
    weight.grad = torch.full_like(weight, -1.0 if value > 0 else 1.0)
    optimizer.step()
    return weight.detach().float()


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_unbiased(share: float, sign: int) -> None:
    gap = 2**-7  # between bf16 numbers from 1 to 2
    rounded = _round(sign * (1 + share * gap), count=200_000)
    assert set(rounded.tolist()) == {sign * 1.0, sign * (1 + gap)}
    up = (rounded.abs() > 1).float().mean().item()
    assert up == pytest.approx(share, abs=4 * (share * (1 - share) / 200_000) ** 0.5)


def test_rounding_depends_on_seed_name_step_and_place_alone() -> None:
    half = 1 + 2**-8
    torch.manual_seed(5)
    first, after = _round(half, count=4096), torch.rand(3)
    torch.manual_seed(6)
    assert torch.equal(first, _round(half, count=4096))
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # others draw what they would have drawn
    for other in (
        _round(half, count=4096, seed=1),
        _round(half, count=4096, name="v"),
        _round(half, count=4096, step=2),
    ):
        same = (first == other).float().mean().item()
        assert same == pytest.approx(0.5, abs=0.04)  # as of independent coins
    up = (first > 1).float() - 0.5
    assert abs((up[1:] * up[:-1]).mean().item()) < 0.02  # neighbours do not know of each other


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
def test_bf16_weights_follow_fp32_ones(state_dtype: str) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters()
    options = {"stochastic_rounding": True, "state_dtype": state_dtype, "lr": 1e-3}
    rounded = build_optimizer(section(AdamWSection, **options), ours.items())
    exact = build_optimizer(section(AdamWSection, lr=1e-3), theirs.items())
    run(rounded, ours, steps=50)
    run(exact, theirs, steps=50)
    apart = torch.cat([(ours[n].float() - theirs[n]).flatten() for n in ours])
    assert apart.mean().abs() < 5e-4  # no drift: 50 updates of 1e-3
    assert ours["wide"].dtype == torch.bfloat16
    assert rounded.state[ours["wide"]]["exp_avg"].dtype == getattr(torch, state_dtype)


# ---- layouts ---------------------------------------------------------------------------------


def shards(
    degrees: dict[str, int], cut: list[Any], dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    named = parameters(dtype)
    if degrees:
        mesh = build_mesh("cpu", **degrees)
        for name, parameter in named.items():
            placements = cut if parameter.ndim == 2 else [Shard(0), Replicate()][: mesh.ndim]
            placed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            named[name] = nn.Parameter(placed)
    return named


def update_on(degrees: dict[str, int], cut: list[Any]) -> dict[tuple[str, str], Tensor]:
    """Weights after five updates by gradients that do not depend on the layout."""
    weights = {}
    for options in (section(AdamW8bitSection), section(AdamWSection, state_dtype="bfloat16")):
        named = shards(degrees, cut, torch.float32)
        run(build_optimizer(options, named.items()), named, steps=5)
        for name, p in named.items():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            weights[options.name, name] = whole.detach()
    return weights


@pytest.mark.parametrize(
    ("degrees", "cut"),
    [
        ({"dp_shard": 4}, [Shard(0)]),  # 6 rows: the last rank has none
        ({"dp_replicate": 2, "dp_shard": 2}, [Replicate(), Shard(0)]),
        ({"dp_shard": 2, "tp": 2}, [Shard(0), Shard(1)]),
        ({"dp_shard": 2, "tp": 2}, [Shard(0), Shard(0)]),
    ],
    ids=str,
)
def test_small_moments_are_the_same_in_every_layout(
    degrees: dict[str, int], cut: list[Any], pool: Pool
) -> None:
    expected = update_on({}, [])
    for result in pool.run(4, update_on, degrees, cut):
        for key, weight in expected.items():
            torch.testing.assert_close(result[key], weight, rtol=0, atol=0)


def round_halves(kind: str) -> tuple[list[int], Tensor]:
    """This rank's place among the shards, and which elements it rounded up: all of them by a coin."""
    mesh = build_mesh("cpu", dp_replicate=2, dp_shard=2)
    ones = torch.ones(8, 512, dtype=torch.bfloat16)
    weight: Any = nn.Parameter(
        distribute_tensor(ones, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    )
    named = {"layers.0.w": weight, "norm.w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    of = MuonSection if kind == "Muon" else AdamWSection
    options = section(of, lr=1.0, stochastic_rounding=True)
    optimizer = build_optimizer(options, named.items(), seed=7)
    torch.manual_seed(torch.distributed.get_rank())  # as ranks with other samples
    weight.grad = torch.zeros_like(weight)
    for group in optimizer.param_groups:
        group["weight_decay"] = -(2**-8)  # from 1 to the middle between it and its neighbour
    optimizer.step()
    return list(mesh.get_coordinate() or ()), weight.detach().to_local() > 1


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_replicas_round_alike_and_shards_do_not(kind: str, pool: Pool) -> None:
    up = {tuple(place): mine for place, mine in pool.run(4, round_halves, kind)}
    for shard in (0, 1):
        assert torch.equal(up[0, shard], up[1, shard])
        assert up[0, shard].float().mean().item() == pytest.approx(0.5, abs=0.05)
    same = (up[0, 0] == up[0, 1]).float().mean().item()
    assert same == pytest.approx(0.5, abs=0.05)


def test_compiled_is_the_same_and_once_for_all_shapes() -> None:
    ours, theirs = parameters(), parameters()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    fused = build_optimizer(section(AdamW8bitSection, implementation="fused"), ours.items())
    run(fused, ours, steps=3)
    others = {
        n: nn.Parameter(torch.ones(s)) for n, s in {"a": (4, 4096), "b": (12, 128)}.items()
    }
    run(
        build_optimizer(section(AdamW8bitSection, implementation="fused"), others.items()),
        others,
        1,
    )
    # One program for matrices in blocks, one for vectors.
    assert stats["unique_graphs"] - before == 2
    run(build_optimizer(section(AdamW8bitSection), theirs.items()), theirs, steps=3)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
