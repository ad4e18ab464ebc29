"""Saving from a device while it goes on computing."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from titan.checkpoint.manager import CheckpointManager, load
from titan.checkpoint.staging import Staging
from titan.config.schema import CheckpointSection


def test_a_copy_beside_the_computation_is_of_its_own_step(tmp_path: Path) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4096, 4096, bias=False, device="cuda")
        fully_shard(model)
        weight = model.weight
        assert isinstance(weight, DTensor)
        section = CheckpointSection(async_mode="async_with_pinned_mem")
        manager = CheckpointManager(section, run_dir=tmp_path)
        buffers = set()
        for step in range(1, 5):
            with torch.no_grad():
                weight.fill_(step)
            state = {"model.weight": weight.detach(), "step": torch.tensor(float(step))}
            path = manager.save(step, state, metadata={}, wait=False)
            for _ in range(20):  # forward and backward passes
                torch.mm(weight.to_local(), weight.to_local())
            manager.staging.before_update()
            with torch.no_grad():
                weight.fill_(-1)  # the update
            copy = manager.staging.buffers["model.weight"]
            assert isinstance(copy, DTensor) and copy.to_local().is_pinned()
            buffers.add(copy.to_local().data_ptr())
            assert manager.poll(wait=True)
            found = {"model.weight": torch.empty(4096, 4096), "step": torch.zeros(())}
            load(path, found)
            assert found["model.weight"].eq(step).all() and found["step"] == step
        assert len(buffers) == 1
        fresh = Staging(overlap=False).begin({"x": weight.detach()})()["x"]
        assert isinstance(fresh, DTensor) and fresh.to_local().eq(-1).all()
    finally:
        dist.destroy_process_group()
