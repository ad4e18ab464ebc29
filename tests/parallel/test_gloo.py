"""Process groups: which backends a run starts, limits and number of the groups, and one thread for each gloo group, because
torch's two free the same string twice (docs/architecture.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.commands import finished
from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.steps import build_step
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer
from titan.checkpoint.commit import CheckpointGroup
from titan.config.schema_course import PhaseSection
from titan.parallel import build_mesh
from titan.parallel.init_distributed import start_process_group
from titan.parallel.torch_compat import limit_gloo

RACE = Path(__file__).with_name("gloo_race.py")


def run_race(*arguments: str) -> int:
    return subprocess.run([sys.executable, RACE, *arguments], capture_output=True).returncode


def test_a_group_made_after_limit_gloo_has_one_thread_and_survives_a_hundred_thousand_gathers():
    assert run_race("--limited", "--gathers=100000") == 0


@pytest.mark.slow
def test_torch_still_frees_a_string_twice_in_groups_of_two_threads():
    """When this fails, torch is fixed: drop shims.limit_gloo for that version on."""
    assert any(run_race("--gathers=160000") < 0 for _ in range(10))


@pytest.mark.parametrize("host_tensors", [False, True])
def test_no_split_of_a_mesh_copies_gloo_on_an_accelerator(
    host_tensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh splits groups off a default group with a bound device, and `split_group` copies all of its backends in C++,
    gloo with two threads."""
    started: dict[str, Any] = {}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **o: started.update(o, backend=backend)
    )
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("RANK", raising=False)
    device = start_process_group(
        init_timeout_s=60, expandable_segments=False, host_tensors=host_tensors
    )
    assert device == torch.device("cuda", 3)
    bound, backend = started["device_id"], started["backend"]
    if host_tensors:
        assert bound is None and dist.BackendConfig(backend).device_backend_map == {
            "cpu": "gloo",
            "cuda": "nccl",
        }
    else:
        assert bound == device and backend == "nccl"


def _options(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options


def checkpoint_group_beside_a_bound_device() -> int:
    limit_gloo(loopback=True)
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    group = CheckpointGroup()
    world.bound_device_id = None  # the pool's barrier has no such device
    assert group.gather(group.rank) == [0, 1]
    return _options(group.process_group)._threads


def test_the_checkpoints_group_has_one_thread_beside_a_bound_device(pool: Pool) -> None:
    assert pool.run(2, checkpoint_group_beside_a_bound_device) == [1, 1]


def limits(folder: Path) -> list[dict[str, timedelta]]:
    """Return the limit of each group before the first step and after the last."""
    degrees = {"data_parallel_shard_degree": 2, "context_parallel_degree": 2}
    comm = {"init_timeout_seconds": 77, "train_timeout_seconds": 66}
    trainer = PoolTrainer(job(folder, parallelism=degrees, comm=comm))
    saves, found = trainer.checkpointing.group, []
    for run in (lambda: 0, trainer.run):
        assert run() == 0
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is not saves]
        found.append({group.group_desc: _options(group)._timeout for group in groups})
    trainer.close()
    return found


def test_all_groups_have_the_limits_of_the_config(pool: Pool, tmp_path: Path) -> None:
    """The first step is where connections hang. No group is made later, so that none has torch's limit."""
    for before, after in pool.run(4, limits, tmp_path):
        assert before.keys() == after.keys() and len(before) >= 3, before
        assert set(before.values()) == {timedelta(seconds=77)}
        assert set(after.values()) == {timedelta(seconds=66)}


def limits_of_steps(folder: Path) -> list[tuple[str, int, float]]:
    """Return the limit of the world's group during each step and each validation."""
    comm = {"init_timeout_seconds": 77, "train_timeout_seconds": 66}
    config = job(
        folder,
        comm=comm,
        training={"seq_len": 32, "steps": 6},
        validation={"enable": True, "freq": 2, "steps": 1, "seq_len": 32},
    )
    phases = [PhaseSection(from_step=5, seq_len=64)]
    trainer = PoolTrainer(config.model_copy(update={"phase": phases}))
    found: list[tuple[str, int, float]] = []
    for name in ("train", "evaluate"):
        inner = getattr(trainer.train_step, name)

        def outer(*args: Any, inner: Any = inner, name: str = name, **options: Any) -> Any:
            limit = _options(dist.group.WORLD)._timeout.total_seconds()
            found.append((name, trainer.step, limit))
            return inner(*args, **options)

        setattr(trainer.train_step, name, outer)
    assert trainer.run() == 0
    trainer.close()
    return found


def test_what_compiles_has_the_longer_limit(pool: Pool, tmp_path: Path) -> None:
    """A phase's first step and a validation compile for their own shapes."""
    long, short = 77.0, 66.0
    for found in pool.run(2, limits_of_steps, tmp_path):
        steps = {step: limit for name, step, limit in found if name == "train"}
        assert steps == {1: long, 2: short, 3: short, 4: short, 5: long, 6: short}
        assert [(s, t) for name, s, t in found if name == "evaluate"] == [
            (2, long),
            (4, long),
            (6, long),
        ]


def groups_of_all_axes() -> list[str]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    axes = {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2}
    degrees = {
        "pipeline_parallel_degree": 2,
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "context_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 4,
    }
    config = job(
        model={"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 2}},
        training={"local_batch_size": 8},
        parallelism=degrees,
    )
    build_step(config, build_mesh("cpu", **axes))
    return [group.group_desc for group in dist.distributed_c10d._world.pg_map]


def test_the_number_of_groups_with_all_axes(pool: Pool) -> None:
    """On GPUs each is a communicator, with its buffers and its part of the start."""
    [groups] = pool.run(1, groups_of_all_axes)
    assert len(groups) <= 16, groups


@tabled("name, loopback, expected")
def test_groups_take_the_interface_that_the_user_names(
    name: str, loopback: bool, expected: list[dict[str, str]]
) -> None:
    """torch reads GLOO_SOCKET_IFNAME only where it makes gloo's devices, and titan makes its own."""
    program = f"""
import torch.distributed as dist
from titan.parallel.torch_compat import limit_gloo
made, create = [], dist.ProcessGroupGloo.create_device
def record(**place):
    made.append(place)
    return create(**place)
dist.ProcessGroupGloo.create_device = record
limit_gloo(loopback={loopback})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert made == {expected}, made
"""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": name}
    finished([sys.executable, "-c", program], env=environment)
