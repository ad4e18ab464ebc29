"""Digests of whole tensors, from parts of any kind, and records of a step, against torch's own sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import Pool
from tests.support.tables import tabled
from titan.numerics import digests
from titan.numerics.digests import CHUNKS, PROJECTIONS, Digest, _signs, digest_of, indices_of
from titan.numerics.recorded import RecordedTensor
from titan.numerics.recorder import Recorder, whole_shapes


def expected(x: Tensor) -> tuple[Tensor, float]:
    """Return projections (P, C) and sum of squares of a whole tensor, by one product with all signs."""
    signs = torch.ones(*x.shape, PROJECTIONS, dtype=torch.float64)
    for dim, length in enumerate(x.shape):
        shape = [1] * x.ndim + [PROJECTIONS]
        shape[dim] = length
        signs *= _signs(torch.arange(length), dim).double().view(shape)
    products = (
        (x.double()[..., None] * signs).flatten(1, -2).sum(1)
        if x.ndim > 1
        else x.double()[:, None] * signs
    )
    rows = torch.arange(len(x)) * CHUNKS // len(x)
    sums = torch.stack([products[rows == chunk].sum(0) for chunk in range(CHUNKS)], dim=1)
    return sums, x.double().square().sum().item()


def assert_is(digest: Digest, x: Tensor, name: str = "") -> None:
    sums, squares = expected(x)
    scale = squares**0.5
    torch.testing.assert_close(
        digest.sums / scale,
        sums / scale,
        rtol=0,
        atol=2e-6,
        msg=lambda m: f"{name}: {m}",
    )
    if digest.squares is not None:
        assert digest.squares == pytest.approx(squares, rel=1e-5), name


@pytest.mark.parametrize("shape", [(7,), (16, 5), (3, 4, 6), (1, 9), (20, 2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_is_a_projection_of_the_tensor(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_is(digest_of(x, [torch.arange(n) for n in shape], shape), x)


def test_parts_add_up_to_the_whole_wherever_they_are() -> None:
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    whole = None
    for rows in order.split([4, 1, 6]):
        for columns in (torch.arange(0, 6, 2), torch.arange(1, 6, 2)):
            part = digest_of(x[rows][:, columns], [rows, columns], x.shape)
            whole = part if whole is None else whole + part
    assert whole is not None
    assert_is(whole, x)


def test_a_large_tensor_is_digested_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 37, 5, generator=torch.Generator().manual_seed(4))
    whole = digest_of(x, [torch.arange(n) for n in x.shape], x.shape)
    monkeypatch.setattr(digests, "_AT_ONCE", 20)
    pieces = digest_of(x, [torch.arange(n) for n in x.shape], x.shape)
    assert_is(whole, x)
    assert_is(pieces, x)


def test_signs_are_even_and_independent() -> None:
    signs = torch.cat([_signs(torch.arange(4096), dim) for dim in range(3)], dim=1).double()
    correlation = signs.T @ signs / len(signs)
    assert (correlation - torch.eye(len(correlation))).abs().max() < 0.08  # 5 / sqrt(4096)
    assert signs.mean(0).abs().max() < 0.08


# ---- parts on ranks ------------------------------------------------------------------------------


class Net(nn.Module):
    """Two matrices of awkward sizes, a norm, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 20), nn.Linear(20, 6)
        self.norm = nn.RMSNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded_like(layout: str) -> dict[str, tuple[Tensor, Digest, bool]]:
    """Return each tensor that a layout shards: whole, and the digest of this rank's part with whether it counts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, tuple[Tensor, Digest, bool]] = {}

    def note(name: str, whole: Tensor, part: Any, is_first: bool) -> None:
        local = part.to_local()
        digest = digest_of(
            local,
            indices_of(part),
            whole.shape,
            is_partial=any(p.is_partial() for p in part.placements),
        )
        found[name] = whole, digest, is_first

    torch.manual_seed(0)
    if layout == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net, plain = seeded(), dict(seeded().named_parameters())
        parallelize_module(
            net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(net, mesh=mesh["dp"])
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, DTensor)
            axes = parameter.device_mesh.mesh_dim_names or ()
            alone = all(
                mesh[a].get_local_rank() == 0
                for a, p in zip(axes, parameter.placements, strict=True)
                if not isinstance(p, Shard) and p.is_replicate()
            )
            missing = "tp" not in axes and mesh["tp"].get_local_rank() > 0
            note(name, plain[name].detach(), parameter.detach(), alone and not missing)
        return found
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    for rows in (8, 5, 1):  # the last ones uneven, or empty on a rank
        whole = torch.randn(rows, 7)
        placement = {"shard": Shard(0), "columns": Shard(1)}.get(layout)
        if placement is not None:
            note(f"{rows}", whole, distribute_tensor(whole, mesh, [placement]), True)
        elif layout == "replicate":
            note(f"{rows}", whole, distribute_tensor(whole, mesh, [Replicate()]), rank == 0)
        else:
            addends = [torch.randn(rows, 7) for _ in range(world)]
            part = DTensor.from_local(addends[rank], mesh, [Partial()], run_check=False)
            note(f"{rows}", torch.stack(addends).sum(0), part, True)
    return found


@tabled("layout, world")
def test_digests_of_parts_of_dtensors_add_up_to_the_whole(
    layout: str, world: int, pool: Pool
) -> None:
    ranks = pool.run(world, sharded_like, layout)
    for name, (whole, _, _) in ranks[0].items():
        digests = [digest for _, digest, counts in (rank[name] for rank in ranks) if counts]
        assert_is(sum(digests[1:], digests[0]), whole, name)


def recorded_alone(layout: str) -> tuple[list[RecordedTensor], dict[str, Any]]:
    """Record a step of a trainer without titan, and return what torch says of the whole model, too."""
    rank, batch = dist.get_rank(), 4
    x = torch.randn(2 * batch, 3, 6, generator=torch.Generator().manual_seed(5))
    plain: Any = seeded()
    outputs: dict[str, Tensor] = {}

    def keep(name: str, out: Tensor) -> None:
        out.retain_grad()
        outputs[name] = out

    for name, module in plain.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
    plain(x).pow(3).sum().backward()
    truth = {f"output {name}": out.detach() for name, out in outputs.items() if name}
    truth |= {f"output gradient {name}": out.grad for name, out in outputs.items() if name}
    truth |= {f"gradient {name}": p.grad for name, p in plain.named_parameters()}
    net: Any = seeded()
    with torch.device("meta"):
        shapes = whole_shapes(
            Net(), lambda model, b, length: model(torch.empty(b, length, 6)), length=3
        )
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    fully_shard(net, mesh=mesh)
    net.set_gradient_divide_factor(1.0)
    net.set_force_sum_reduction_for_comms(True)
    recorder = Recorder([net], shapes, mesh=mesh)
    recorder.begin(batch=batch, samples=batch, positions=torch.arange(3), length=3)
    net(x.chunk(2)[rank]).pow(3).sum().backward()
    recorder.parameters("gradient")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.5 * parameter.grad
    recorder.parameters("update")
    truth |= {f"update {name}": -0.5 * p.grad for name, p in plain.named_parameters()}
    return recorder.end(), truth


def test_a_trainer_of_its_own_records_what_torch_computes(pool: Pool) -> None:
    (tensors, truth), (nothing, _) = pool.run(2, recorded_alone, "")
    assert nothing == []
    found = {f"{t.kind} {t.name}": t for t in tensors}
    assert found.keys() == truth.keys() | {f"weight {n}" for n, _ in Net().named_parameters()}
    for name, whole in truth.items():
        tensor = found[name]
        squares = None if tensor.norm is None else tensor.norm**2
        sums = torch.tensor(tensor.sums, dtype=torch.float64)
        assert_is(Digest(sums, squares, tensor.dtype), whole, name)
        assert not tensor.copies


def test_whole_shapes_name_the_dimensions_that_follow_the_batch() -> None:
    with torch.device("meta"):

        def run(model: nn.Module, batch: int, length: int) -> Any:
            return model(torch.empty(batch, length, 6))

        shapes = whole_shapes(Net(), run, length=16)
        flat = whole_shapes(nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 4)), run, length=16)
    assert shapes["up"] == ("B", "S", 20) and shapes["norm"] == ("B", "S", 6)
    assert flat["1"] == ("BS", 4)
