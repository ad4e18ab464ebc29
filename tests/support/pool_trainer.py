"""The trainer on the ranks of a pool, whose process group is there already and stays."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan.config.schema import JobConfig
from titan.trainer import Trainer


class PoolTrainer(Trainer):
    def __init__(self, config: JobConfig) -> None:
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        super().__init__(config)

    def _init_distributed(self) -> torch.device:
        return torch.device("cpu")

    def close(self) -> None:
        with patch.object(dist, "destroy_process_group"):
            super().close()
