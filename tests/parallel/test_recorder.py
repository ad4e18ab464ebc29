"""The recorder in a trainer of one's own: a plain model, torch's own FSDP2 and tensor parallelism, and no job."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import Pool
from titan.numerics.digests import digest_of
from titan.numerics.recorded import RecordedTensor
from titan.numerics.recorder import Recorder, source_line, whole_shapes

BATCH, LENGTH, WIDTH = 8, 6, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.down(torch.tanh(self.up(self.norm(x_BSD))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def run_on_meta(model: nn.Module, batch: int, length: int) -> None:
    model(torch.empty(batch, length, WIDTH, device="meta"))


def step(kind: str) -> list[RecordedTensor]:
    """Return the record of the second micro-batches' step of a layout."""
    model: Any = build()
    mesh = None
    with torch.device("meta"):
        shapes = whole_shapes(nn.Sequential(Layer(), Layer()), run_on_meta, length=LENGTH)
    share, rank = BATCH, 0
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        share, rank = BATCH // mesh.size(), mesh.get_local_rank()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for sharded in (*model, model):
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model:
            parallelize_module(layer, mesh, plan)
    recorder = Recorder([model], shapes, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x_BSD = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    recorder.begin(
        batch=share // 2, samples=share, positions=torch.arange(LENGTH), length=LENGTH
    )
    world = BATCH // share
    for number in range(2):
        # Micro-batches take turns over the ranks.
        mine = x_BSD.chunk(2 * world)[number * world + rank]
        loss = model(mine).square().sum() / BATCH
        loss.backward()
    recorder.parameters("gradient")
    optimizer.step()
    recorder.parameters("update")
    return recorder.end()


def distance(a: RecordedTensor, b: RecordedTensor) -> float:
    one, two = torch.tensor(a.sums), torch.tensor(b.sums)
    return ((one - two).norm() / one.norm().clamp(min=1e-12)).item()


def test_layouts_of_torch_have_the_record_of_one_process(pool: Pool) -> None:
    [alone] = pool.run(1, step, "alone")
    by_key = {(t.kind, t.name): t for t in alone}
    assert {kind for kind, _ in by_key} == {
        "weight",
        "output",
        "output gradient",
        "gradient",
        "update",
    }
    assert ("output", "1.down") in by_key and ("gradient", "0.up.weight") in by_key
    for kind, world in (("fsdp", 2), ("fsdp", 4), ("tp", 2)):
        found, *others = pool.run(world, step, kind)
        assert not any(others)  # on rank 0 only
        assert {(t.kind, t.name) for t in found} == by_key.keys(), kind
        for tensor in found:
            true = by_key[tensor.kind, tensor.name]
            assert distance(true, tensor) < (1e-4 if tensor.kind == "update" else 2e-6), tensor
            assert not tensor.copies
            if tensor.norm is not None:
                assert true.norm is not None
                assert abs(tensor.norm**2 - true.norm**2) <= 1e-5 * true.norm**2


def test_whole_tensors_and_their_norms(pool: Pool) -> None:
    """Whole tensors are those of a model that no recorder watches."""
    [alone] = pool.run(1, step, "alone")
    kept = {(t.kind, t.name): t for t in alone}
    model = build()
    seen: dict[str, Any] = {}
    model[1].get_submodule("up").register_forward_hook(lambda _, __, out: seen.update(up=out))
    x_BSD = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    (model(x_BSD).square().sum() / BATCH).backward()
    output = kept["output", "1.up"]
    assert_whole(output, seen["up"])
    assert output.norm is not None
    assert abs(output.norm**2 - seen["up"].square().sum().item()) < 1e-3
    gradient = model[0].get_submodule("down").get_parameter("weight").grad
    assert gradient is not None
    assert_whole(kept["gradient", "0.down.weight"], gradient)


def assert_whole(found: RecordedTensor, x: Tensor) -> None:
    whole = digest_of(x, [torch.arange(n) for n in x.shape], x.shape)
    sums = torch.tensor(found.sums, dtype=torch.float64)
    torch.testing.assert_close(sums, whole.sums, rtol=1.3e-6, atol=1e-5)


def test_a_missing_sum_shows_as_copies_that_differ(pool: Pool) -> None:
    found, _ = pool.run(2, unreduced)
    [norm] = [t for t in found if (t.kind, t.name) == ("gradient", "0.norm.weight")]
    assert norm.copies == [[1, 0]]


def unreduced() -> list[RecordedTensor]:
    """Ranks that hold different samples, and forget to add their gradients up."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    model, rank = build(), mesh.get_local_rank()
    recorder = Recorder([model], {}, mesh=mesh)
    recorder.begin(batch=4, samples=4, positions=torch.arange(LENGTH), length=LENGTH)
    x_BSD = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x_BSD.chunk(2)[rank]).square().sum().backward()
    recorder.parameters("gradient")
    return recorder.end()


def test_the_line_is_one_of_the_model() -> None:
    modules = dict(build().named_modules())
    first = inspect.getsourcelines(Layer.forward)[1]
    for name in ("0", "0.down", "1.norm.weight"):
        assert source_line(modules, name).endswith(f"test_recorder.py:{first}"), name
