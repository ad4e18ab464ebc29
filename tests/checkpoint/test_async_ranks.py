"""Saving in the background on several ranks: sharded state, bit for bit, and nobody waits for anybody in the wrong group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.runs import numbers, saved_tensors
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer, run_to_end
from titan.checkpoint.manager import (
    CheckpointManager,
    SaveFailed,
    list_steps,
)
from titan.checkpoint.manifest import find_damage
from titan.config.schema import CheckpointSection


def train(folder: Path, mode: str, steps: int, parallelism: dict[str, int]) -> None:
    config = job(
        folder,
        training={"seq_len": 16, "steps": steps},
        parallelism=parallelism,
        lr_scheduler={"warmup_steps": 2, "total_steps": 6},
        checkpoint={"interval": 1, "async_mode": mode, "keep_latest_k": 0},
    )
    run_to_end(PoolTrainer(config))


@tabled("mode, parallelism")
def test_resumed_equals_uninterrupted(
    mode: str, parallelism: dict[str, int], pool: Pool, tmp_path: Path
) -> None:
    whole, parts, sync = (tmp_path / name for name in ("whole", "parts", "sync"))
    pool.run(2, train, whole, mode, 6, parallelism)
    for steps in (3, 6):
        pool.run(2, train, parts, mode, steps, parallelism)
    pool.run(2, train, sync, "disabled", 6, parallelism)
    assert numbers(parts) == numbers(whole) == numbers(sync)
    assert list_steps(whole / "checkpoint") == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        paths = [folder / "checkpoint" / f"step-{step}" for folder in (sync, whole, parts)]
        assert not any(find_damage(path) for path in paths)
        expected, *others = (saved_tensors(path, rng=True) for path in paths)
        for found in others:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def save_while_training(folder: Path) -> int:
    """Collectives of both at once, many of them; the sum says that none got another's data."""
    os.environ["RANK"] = str(dist.get_rank())
    manager = CheckpointManager(
        CheckpointSection(async_mode="async", keep_latest_k=3), run_dir=folder
    )
    total = torch.zeros(())
    state: dict[str, Any] = {"model.x": torch.ones(100_000)}
    for step in range(1, 6):
        manager.save(step, state, metadata={}, wait=False)
        while manager.background is not None:
            value = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(value)
            total += value - 3
            going = torch.tensor(float(not manager.background.done()))
            dist.all_reduce(going)  # the ranks stop together
            if going == 0:
                assert manager.poll()
    return int(total)


def test_training_goes_on_in_its_own_group(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, save_while_training, tmp_path) == [0, 0]
    assert list_steps(tmp_path / "checkpoint") == [3, 4, 5]


def save_changing_tensors(folder: Path) -> None:
    """Save the same tensors twice, others, and the first again; then fail while rank 1 plans, and save once more."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    manager = CheckpointManager(CheckpointSection(keep_latest_k=0), run_dir=folder)

    def state(step: int, *, rows: int = 2) -> dict[str, Any]:
        local = torch.full((rows, 3), 10.0 * step + rank)
        return {
            "model.x": DTensor.from_local(local, mesh, [Shard(0)]),
            "model.y": local[0] - rank,
        }

    for step in (1, 2):
        manager.save(step, state(step), metadata={})
    manager.save(3, state(3, rows=4) | {"model.z": torch.ones(5)}, metadata={})
    manager.save(4, state(4), metadata={})
    plan = DefaultSavePlanner.create_global_plan

    def fail(*_: Any) -> Any:
        raise OSError("no plan")

    manager.group.forget_plans()
    DefaultSavePlanner.create_global_plan = fail  # pyrefly: ignore[bad-assignment]
    try:
        with pytest.raises(SaveFailed, match="no plan"):
            manager.save(5, state(5), metadata={})
    finally:
        DefaultSavePlanner.create_global_plan = plan
    manager.save(6, state(6), metadata={})


def test_plans_that_are_kept_describe_what_is_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_changing_tensors, tmp_path)
    assert list_steps(tmp_path / "checkpoint") == [1, 2, 3, 4, 6]
    for step in (1, 2, 3, 4, 6):
        path = tmp_path / "checkpoint" / f"step-{step}"
        assert not find_damage(path)
        found, rows = saved_tensors(path, rng=True), 4 if step == 3 else 2
        of_rank = [torch.full((rows, 3), 10.0 * step + rank) for rank in (0, 1)]
        assert torch.equal(found["model.x"], torch.cat(of_rank))
        assert torch.equal(found["model.y"], torch.full((3,), 10.0 * step))
        assert ("model.z" in found) == (step == 3)
