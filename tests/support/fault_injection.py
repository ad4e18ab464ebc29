"""A hook that injects the fault which TITAN_FAULT names into an otherwise normal run.

TITAN_FAULT=nan:SAMPLE      the step that trains on this sample (a global number) computes NaN, on the rank that has it
TITAN_FAULT=spike:SAMPLE    ... a loss and gradients far off
TITAN_FAULT=flip:RANK:STEP  before this step, one bit of one weight flips on one rank
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from titan.data.packing import Batch
from titan.optim.states import local
from titan.run.hook import Hook
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer

_FACTORS = {"nan": float("nan"), "spike": 1e3}


class FaultInjection(Hook):
    def __init__(self, trainer: Trainer, fault: str) -> None:
        self.trainer = trainer
        self.kind, *numbers = fault.split(":")
        self.numbers = [int(number) for number in numbers]
        self.is_active = False
        if self.kind in _FACTORS:
            trainer.train_step.model_parts[-1].register_forward_hook(self._scale)

    def before_forward(self, batches: Sequence[Batch]) -> None:
        if self.kind == "flip":
            if self.numbers == [self.trainer.rank, self.trainer.step]:
                self._flip()
            return
        size = self.trainer.config.training.local_batch_size
        starts = [batch.first_sample for batch in batches]
        self.is_active = any(start <= self.numbers[0] < start + size for start in starts)

    def _scale(self, module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return output * _FACTORS[self.kind] if self.is_active and module.training else output

    @torch.no_grad()
    def _flip(self) -> None:
        first = next(self.trainer.train_step.model_parts[0].parameters())
        weight = local(first).view(-1)[:1].view(torch.uint8)
        weight[0] ^= 1


def hooks_with_faults(trainer: Any) -> list[Hook]:
    """Return the standard hooks, and before them the fault that TITAN_FAULT names."""
    fault = os.environ.get("TITAN_FAULT")
    return [*([FaultInjection(trainer, fault)] if fault else []), *standard_hooks(trainer)]
