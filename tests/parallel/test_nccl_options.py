"""Options of NCCL reach the groups of their axes. A CPU build of torch has no NCCL: its class of options is a fake one here."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.steps import build_step
from titan.config.schema import JobConfig
from titan.parallel import build_mesh, submesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
Made = dict[str, list[dict[str, Any] | None]]


class Options(device_mesh.C10dBackend.Options):
    """As ProcessGroupNCCL.Options: a config with NCCL's own values, and the priority."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(backend="nccl", timeout=timedelta(seconds=9))
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None, cga_cluster_size=None, net_name=None)  # fmt: skip


@contextmanager
def fake_nccl(backend: str) -> Any:
    """Note the options of each group that a mesh makes, in a world whose backend has a name."""
    made: Made = {}
    seen: dict[Options, str] = {}
    new_group = device_mesh.new_group

    def note(*args: Any, pg_options: Any = None, group_desc: str, **more: Any) -> Any:
        options = None
        if pg_options is not None:
            # torch writes into the options of the one group that this rank is in.
            assert seen.setdefault(pg_options, group_desc) == group_desc
            values = {k: v for k, v in vars(pg_options.config).items() if v is not None}
            options = values | {"high": pg_options.is_high_priority_stream}
        found = made.setdefault(group_desc.removeprefix("mesh_"), [])
        if options not in found:
            found.append(options)
        return new_group(*args, group_desc=group_desc, **more)

    with (
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
        patch.object(dist, "get_default_backend_for_device", lambda _: backend),
        patch.object(device_mesh, "new_group", note),
    ):
        yield made


def groups_of(config: JobConfig, degrees: dict[str, int], world: int, backend: str) -> Any:
    """Return the options of all groups of a step's meshes, and the axes whose group is the default one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with fake_nccl(backend) as made:
        mesh = build_mesh("cpu", **degrees, nccl=config.comm.nccl.options())
        build_step(config, mesh)
    names = [axis for axis in AXES if axis in (mesh.mesh_dim_names or ())]
    default = dist.distributed_c10d._get_default_group().group_name
    of_default = [axis for axis in names if mesh[axis].get_group().group_name == default]
    joined = submesh(mesh, "dp_shard", "cp", flatten=True)
    return made, of_default, None if joined is None else joined.get_group().group_desc


def job_of(degrees: dict[str, int], **nccl: dict[str, Any]) -> JobConfig:
    return job(
        model={"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 2}},
        training={"local_batch_size": 8},
        parallelism={KEYS[axis]: degree for axis, degree in degrees.items()},
        comm={"nccl": nccl},
    )


def run(pool: Pool, degrees: dict[str, int], *, backend: str = "nccl", **nccl: dict[str, Any]) -> Any:  # fmt: skip
    config, world = job_of(degrees, **nccl), 1
    mesh = {axis: n for axis, n in degrees.items() if axis != "ep"}
    for degree in mesh.values():
        world *= degree
    return pool.run(1, groups_of, config, mesh, world, backend)[0]


DEGREES = {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2, "ep": 4}


def test_each_axis_has_its_own(pool: Pool) -> None:
    """Also both meshes of an axis that they share, and FSDP's axis, which joins two."""
    made, _, joined = run(
        pool,
        DEGREES,
        dp_shard={"max_ctas": 16, "min_ctas": 4},
        dp_replicate={"cga_cluster_size": 2},
        ep={"high_priority_stream": True, "max_ctas": 8},
        efsdp={"net_name": "IB"},
        tp={"cga_cluster_size": 0},
    )
    shard = [{"max_ctas": 16, "min_ctas": 4, "high": False}]
    assert made["dp_shard"] == made["dp_shard_cp"] == shard
    assert made["dp_replicate"] == [{"cga_cluster_size": 2, "high": False}]
    assert made["ep"] == [{"max_ctas": 8, "high": True}]
    assert made["efsdp"] == [{"net_name": "IB", "high": False}]
    assert made["tp"] == [{"cga_cluster_size": 0, "high": False}]
    with_none = {axis for axis, options in made.items() if options == [None]}
    assert {"pp", "cp"} <= with_none
    assert len(made) == len(with_none) + 6
    assert joined == "mesh_dp_shard_cp"  # the one that was made with options


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_an_axis_of_all_ranks_leaves_the_default_group_to_flags(
    backend: str, pool: Pool
) -> None:
    """torch gives such an axis the default group, over which the trainer sends flags. gloo has no options to give it."""
    made, of_default, _ = run(pool, {"dp_shard": 4}, backend=backend, dp_shard={"max_ctas": 16})
    assert of_default == ([] if backend == "nccl" else ["dp_shard"])
    assert made.get("dp_shard", []) == ([{"max_ctas": 16, "high": False}] * (backend == "nccl"))
    _, of_default, _ = run(pool, {"dp_shard": 4}, backend=backend)
    assert of_default == ["dp_shard"]
