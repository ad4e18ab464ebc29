"""Moments in 8 bits and bf16, stochastic rounding: against torch, torchao, and the same numbers in every layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import Pool
from titan.config.schema import (
    AdamSection,
    AdamW8bitSection,
    AdamWSection,
    MuonSection,
    OptimizerSection,
)
from titan.optim.adam import CompactAdam
from titan.optim.eightbit import block_size, dequantize, levels, quantize
from titan.optim.muon import Muon
from titan.optim.optimizers import build_optimizer
from titan.optim.rounding import Dice, RoundingNoise, StepNoise, rounded
from titan.parallel import build_mesh

CPU = torch.device("cpu")


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


def run(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], steps: int = 10) -> None:
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
    compact = CompactAdam(
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


def test_what_eight_bits_keep() -> None:
    for signed, x in ((True, torch.randn(64, 2048)), (False, torch.randn(64, 2048).square())):
        kinds = levels(CPU)
        blocks, of = x.view(-1, 256), kinds[0 if signed else 1]
        codes, scale = quantize(blocks, of)
        assert codes.dtype == torch.uint8 and scale.shape == (512, 1)
        assert torch.equal(scale, blocks.abs().amax(-1, keepdim=True))
        error = dequantize(codes, scale, of) - blocks
        # The widest gap between levels is a 64th (signed) or a 128th of 0.9 of the range; an error is half of it. Without
        # its sign, the largest value of a block may be -1, for which the lowest level is short by as much.
        widest = 0.9 / (64 if signed else 128)
        assert (error.abs() <= scale * widest * 0.51).all()
        codes, scale = quantize(torch.zeros(2, 64), kinds[0])
        assert torch.equal(dequantize(codes, scale, kinds[0]), torch.zeros(2, 64))


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
    def build() -> CompactAdam:
        named = parameters(weights)
        return CompactAdam(
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
    others = CompactAdam([vector], lr=0.1, betas=(0.9, 0.95), eps=1e-8, state_dtype=torch.float32)
    optimizer = Muon([weight], others=others, lr=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        loss = (weight @ vector).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16
    assert (weight != 1).any() and (vector != 1).all()
    assert others.step(lambda: 5) == 5


# ---- stochastic rounding ---------------------------------------------------------------------


def _round(value: float, *, count: int, step: int = 1, seed: int = 0, name: str = "w") -> Tensor:
    target = torch.full((count,), value)
    return rounded(target, noise_of(target, seed=seed, name=name, step=step))


def noise_of(whole: Tensor, *, seed: int = 0, name: str = "w", step: int = 1) -> StepNoise:
    dice = Dice({whole: RoundingNoise(whole, seed=seed, name=name)})
    noise = dice.at_step(step, [(whole, 0, whole.numel())])
    assert noise is not None
    return noise


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_unbiased(share: float, sign: int) -> None:
    gap = 2**-7  # between bf16 numbers from 1 to 2
    rounded = _round(sign * (1 + share * gap), count=200_000)
    assert set(rounded.tolist()) == {sign * 1.0, sign * (1 + gap)}
    up = (rounded.abs() > 1).float().mean().item()
    assert up == pytest.approx(share, abs=4 * (share * (1 - share) / 200_000) ** 0.5)


def test_what_bf16_holds_is_not_rounded() -> None:
    x = torch.randn(1000).bfloat16()
    x[0], x[1], x[2] = float("inf"), float("-inf"), float("nan")
    target = rounded(x.float(), noise_of(x)).bfloat16()
    assert torch.equal(target[:2], x[:2]) and target[2].isnan()
    assert torch.equal(target[3:], x[3:])
    not_canonical = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(not_canonical, noise_of(not_canonical)).bfloat16().isnan()


def test_dice_depend_on_seed_name_step_and_place_alone() -> None:
    half = 1 + 2**-8
    first = _round(half, count=4096)
    assert torch.equal(first, _round(half, count=4096))
    for other in (
        _round(half, count=4096, seed=1),
        _round(half, count=4096, name="v"),
        _round(half, count=4096, step=2),
    ):
        same = (first == other).float().mean().item()
        assert same == pytest.approx(0.5, abs=0.04)  # as of independent coins
    up = (first > 1).float() - 0.5
    assert abs((up[1:] * up[:-1]).mean().item()) < 0.02  # neighbours do not know of each other


def test_small_updates_count_on_average() -> None:
    """2,000 updates of a thousandth of a gap: to the nearest they are all lost, rounded stochastically two gaps come about."""
    steps, gap = 2000, 2**-7
    moved = {}
    for random in (True, False):
        weight = torch.ones(2000, dtype=torch.bfloat16)
        dice = Dice({weight: RoundingNoise(weight, seed=0, name="w")} if random else None)
        for step in range(steps):
            noise = dice.at_step(step, [(weight, 0, 2000)])
            weight.copy_(rounded(weight.float() + gap / 1000, noise))
        moved[random] = ((weight.float() - 1).mean() / gap).item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(2, abs=0.1)


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


def update_each(degrees: dict[str, int], cut: list[Any]) -> dict[str, dict[str, Tensor]]:
    return {kind: update_on(degrees, cut, kind) for kind in ("eight", "bf16", "rounded")}


def update_on(degrees: dict[str, int], cut: list[Any], kind: str) -> dict[str, Tensor]:
    """Weights after five updates by gradients that do not depend on the layout."""
    rounded = kind == "rounded"
    named = parameters(torch.bfloat16 if rounded else torch.float32)
    if degrees:
        mesh = build_mesh("cpu", **degrees)
        for name, parameter in named.items():
            placements = cut if parameter.ndim == 2 else [Shard(0), Replicate()][: mesh.ndim]
            placed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            named[name] = nn.Parameter(placed)
    options = {
        "eight": section(AdamW8bitSection),
        "bf16": section(AdamWSection, state_dtype="bfloat16"),
        "rounded": section(AdamWSection, stochastic_rounding=True),
    }[kind]
    run(build_optimizer(options, named.items()), named, steps=5)
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named.items()
    }


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
def test_the_same_bits_in_every_layout(degrees: dict[str, int], cut: list[Any], pool: Pool) -> None:
    expected = update_each({}, [])
    for result in pool.run(4, update_each, degrees, cut):
        for kind, weights in expected.items():
            for name, weight in weights.items():
                assert torch.equal(result[kind][name], weight), (kind, name)


def offsets(strided: bool) -> list[Tensor]:
    """What FSDP2 makes of a matrix that tensor parallelism has cut: the places of this rank's elements, and RoundingNoise's."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = build_mesh("cpu", dp_shard=2, tp=2)
    model = nn.Linear(3, 12, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(36.0).view(12, 3))
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp_shard"])
    weight = model.weight
    assert isinstance(weight, DTensor) and hasattr(weight.placements[0], "split_factor") == strided
    noise = RoundingNoise(weight, seed=0, name="w")
    return [weight.to_local().detach()[0, 0], torch.tensor(noise.offset)]


def test_places_of_rows_cut_twice(pool: Pool) -> None:
    for place, offset in pool.run(4, offsets, True):
        assert place == offset


def test_compiled_is_the_same_and_once_for_all_shapes() -> None:
    ours, theirs = parameters(), parameters()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    fused = build_optimizer(section(AdamW8bitSection, implementation="fused"), ours.items())
    run(fused, ours, steps=3)
    others = {n: nn.Parameter(torch.ones(s)) for n, s in {"a": (4, 4096), "b": (12, 128)}.items()}
    run(
        build_optimizer(section(AdamW8bitSection, implementation="fused"), others.items()),
        others,
        1,
    )
    # One program for blocks of 256, as many as there are levels, one for smaller ones; vectors are not compiled.
    assert stats["unique_graphs"] - before == 2
    run(build_optimizer(section(AdamW8bitSection), theirs.items()), theirs, steps=3)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


# ---- vectors of many parameters ----------------------------------------------------------------

KINDS = {
    "eight": (AdamW8bitSection, {}, torch.float32),
    "bf16": (AdamWSection, {"state_dtype": "bfloat16"}, torch.float32),
    "rounded": (AdamWSection, {"stochastic_rounding": True}, torch.bfloat16),
    "muon": (MuonSection, {"stochastic_rounding": True}, torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_joined_and_cut_the_bits_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters each by itself, all in one vector, and large ones in slices that end amid a row."""
    option, settings, dtype = KINDS[kind]
    results = []
    for small, largest in ((0, 2**40), (2**40, 2**40), (2048, 2048), (2**40, 1)):
        monkeypatch.setattr("titan.optim.adam.SMALL_ON_HOST", small)
        monkeypatch.setattr("titan.optim.adam.LARGEST", largest)
        monkeypatch.setattr("titan.optim.muon.LARGEST", largest)
        named = {f"layers.{n}": p for n, p in parameters(dtype).items()}
        named["layers.same"] = nn.Parameter(named["layers.wide"].detach().clone() / 2)
        run(build_optimizer(section(option, **settings), named.items()), named, steps=3)
        results.append(list(named.values()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Launches(TorchDispatchMode):
    """Count operations on parameters that are no views: a launch each on an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, list | tuple) and result else result
        # Scalars are on the host. What works on lists in place returns nothing.
        computes = first is None or (isinstance(first, Tensor) and first.ndim > 0)
        self.count += computes and not func.is_view and "detach" not in str(func)
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_more_parameters_launch_no_more(kind: str) -> None:
    option, settings, dtype = KINDS[kind]
    counts = []
    for copies in (2, 12):
        named = {
            f"layers.{i}.{name}": p for i in range(copies) for name, p in parameters(dtype).items()
        }
        optimizer = build_optimizer(section(option, **settings), named.items())
        run(optimizer, named, steps=1)
        set_gradients(named, 1)
        with Launches() as launches:
            optimizer.step()
        counts.append(launches.count)
    assert counts[0] == counts[1] > 0
