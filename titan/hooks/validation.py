"""Compute the loss on held-out text every `validation.freq` steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from titan.async_scalars import AsyncScalars
from titan.data.packing import Batch
from titan.data.statistics import unigram_bits_per_byte
from titan.hook import Hook, Run, StepResult
from titan.observe.clock import Window
from titan.observe.rows import Row


class Validation(Hook):
    """Evaluate the model on the same samples each time. `row` is the result of this step, or None."""

    def __init__(self, trainer: Run) -> None:
        self.trainer, self.section = trainer, trainer.config.validation
        self.row: Row | None = None

    def needs_results(self) -> bool:
        step, last_step = self.trainer.step, self.trainer.last_step
        return self.section.enable and (step == last_step or step % self.section.freq == 0)

    def step_end(self) -> None:
        self.row = self._validate() if self.needs_results() else None

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return self.row or {}

    def _validate(self) -> Row:
        trainer, loader = self.trainer, self.trainer.validation_loader
        assert loader is not None, "the rules demand validation data"
        # Bytes of text, for a figure that does not depend on the tokenizer. Batches pass by once, so count them on the way.
        sizes: list[int] = []

        def batches() -> Iterator[Batch]:
            for batch in loader.validation_batches(self.section.steps):
                sizes.append(loader.num_bytes(batch))
                yield batch

        with trainer.timer.pause("validation"):
            loss_sum, num_valid = trainer.train_step.evaluate(batches())
            num_bytes = torch.tensor(sum(sizes), device=trainer.device)
            if trainer.train_step.groups.data is not None:
                dist.all_reduce(num_bytes, group=trainer.train_step.groups.data)
            # One wait for the device: every number is a sum over all data-parallel ranks.
            loss, valid, size = AsyncScalars([loss_sum, num_valid, num_bytes]).values()
        # The mean over all tokens of all ranks. A text without valid tokens divides by 1.
        loss_per_token = loss / max(valid, 1)
        trainer.events.write(
            "validation", step=trainer.step, spent=trainer.timer.total_s, loss=loss_per_token
        )
        return {
            "validation_loss": loss_per_token,
            "bits_per_byte": loss / math.log(2) / size if size else None,
            # Only rank 0 prints it, and computing it reads the text.
            "unigram_bits_per_byte": self.unigram_bits_per_byte if trainer.rank == 0 else None,
        }

    @cached_property
    def unigram_bits_per_byte(self) -> float | None:
        """Return the bits per byte that byte frequencies alone reach on the validation text, as a yardstick."""
        train, validation = self.trainer.loader, self.trainer.validation_loader
        assert validation is not None
        return unigram_bits_per_byte(train, validation=validation)
