"""Hook for the loss of multi-token prediction: a column in addition to the loss of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from titan.base.async_scalars import AsyncScalars
from titan.data.base import TensorBatch
from titan.observe.clock import Window
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport
from titan.tasks.next_token import MTPLoss


class MTPMetrics(Hook):
    """Loss of multi-token prediction, summed over all ranks at logged steps.

    Attributes:
        means: mean losses of the step's micro-batches.
        measured: loss of the last step, if it was logged.
    """

    priority = 120

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        loss = trainer.train_step.loss_sum
        self.means: list[torch.Tensor] = loss.means if isinstance(loss, MTPLoss) else []
        self.measured: AsyncScalars | None = None

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        self.means.clear()

    def updated(self, report: StepReport) -> None:
        step, self.measured = self.trainer.train_step, None
        if not self.trainer.logs_this_step:
            return
        total = torch.stack([torch.zeros((), device=step.device), *self.means]).sum()
        if step.groups.loss is not None:
            dist.all_reduce(total, group=step.groups.loss)
        step.sum_over_groups([total])
        self.measured = AsyncScalars([total / report.num_valid.clamp(min=1)])

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return {} if self.measured is None else {"mtp_loss": self.measured.values()[0]}


def hook(trainer: RunProgress) -> MTPMetrics | None:
    """Return the hook of a model with modules for multi-token prediction."""
    return MTPMetrics(trainer) if trainer.sizes.num_mtp_modules else None
