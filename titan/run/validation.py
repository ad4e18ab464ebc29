"""Hook for the loss on held-out samples every `validation.freq` steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist

from titan.base.async_scalars import AsyncScalars, to_device
from titan.base.rows import Row
from titan.data.base import TensorBatch
from titan.observe.clock import Window
from titan.optim.averaged import averaged
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress


class Validation(Hook):
    """Validation on the same samples each time.

    Attributes:
        row: columns of this step; None if it does not validate.
        texts: newest generated texts by their prompts.
    """

    priority = 80

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.section = trainer, trainer.config.validation
        self.row: Row | None = None
        self.texts: Mapping[str, str] | None = None

    def validates(self) -> bool:
        step, last_step = self.trainer.step, self.trainer.last_step
        return self.section.enable and (step == last_step or step % self.section.freq == 0)

    def step_end(self) -> None:
        self.row = self._validate() if self.validates() else None

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return self.row or {}

    def _validate(self) -> Row:
        trainer, loader = self.trainer, self.trainer.validation_loader
        assert loader is not None, "the rules demand validation data"
        # The task reports more than the loss. Batches pass once, so it measures them on the way.
        measured: list[float] = []

        def batches() -> Iterator[TensorBatch]:
            for batch in loader.validation_batches(self.section.steps):
                measured.append(trainer.task.measure(batch))
                yield batch

        with trainer.timer.pause("validation"):
            with averaged(trainer.train_step, validates=True):
                loss_sum, num_valid = trainer.train_step.evaluate(batches())
            total = to_device([sum(measured)], trainer.device)
            if trainer.train_step.groups.data is not None:
                dist.all_reduce(total, group=trainer.train_step.groups.data)
            # Wait for the device once: every number is a sum over all data-parallel ranks.
            groups = trainer.train_step.group_sums
            sums = [loss_sum, num_valid, total[0], *groups.sums]
            loss, valid, sum_measured, *of_groups = AsyncScalars(sums).values()
            with averaged(trainer.train_step):
                trainer.train_step.compute_scales()
                self.texts = trainer.task.generate(trainer)
            columns = trainer.task.report(
                trainer, loss=loss, num_valid=valid, measured=sum_measured
            )
        # Other samples than a blend's are one source, whatever the job trains on.
        if loader.samples.sources(np.arange(1)) is not None:
            columns |= groups.columns(of_groups, prefix="source_validation")
        # The mean over all ranks' valid tokens or positions. Divide by 1 if none is valid.
        mean_loss = loss / max(valid, 1)
        trainer.events.write(
            "validation", step=trainer.step, spent=trainer.timer.total_s, loss=mean_loss
        )
        return {"validation_loss": mean_loss, **columns}
