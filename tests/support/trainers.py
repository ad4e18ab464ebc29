"""The trainer with the standard hooks, resumed and ready for its first step; and the same on the ranks of a pool."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fault_injection import hooks_with_faults
from titan.checkpoint.manager import CheckpointManager
from titan.config.schema import JobConfig
from titan.run import trainer
from titan.run.checkpointing import Checkpointing


class Trainer(trainer.Trainer):
    def __init__(self, config: JobConfig, **options: Any) -> None:
        options.setdefault("hooks", hooks_with_faults)
        super().__init__(config, **options)
        self.start()

    @property
    def checkpointing(self) -> Checkpointing:
        hook = self.hook(Checkpointing)
        assert hook is not None
        return hook

    @property
    def checkpoints(self) -> CheckpointManager:
        return self.checkpointing.manager


class PoolTrainer(Trainer):
    """Use the process group of the pool, which stays."""

    def __init__(self, config: JobConfig, **options: Any) -> None:
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        super().__init__(config, **options)

    def _init_distributed(self) -> torch.device:
        return torch.device("cpu")

    def close(self, *, failed: bool = True) -> None:
        super().close(failed=failed)


def run_to_end(trainer: Any) -> None:
    try:
        assert trainer.run() == 0
    finally:
        trainer.close()
