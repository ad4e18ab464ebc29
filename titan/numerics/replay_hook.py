"""Hook that computes a micro-batch twice every `fault_tolerance.replay_every` steps, and compares the bits on each rank."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from titan.data.base import TensorBatch
from titan.numerics.replay import BitsError, bits_of, describe, first_difference
from titan.run.hook import Hook
from titan.run.progress import RunProgress


class Replay(Hook):
    """Check of the devices before a step. The step itself computes what it would compute without it."""

    priority = 30

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.section = trainer, trainer.config.fault_tolerance

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        """Compute the first micro-batch of a step twice.

        Raises:
            BitsError: bits differ on some rank, and the run has to stop. All ranks raise it.
        """
        trainer = self.trainer
        if trainer.step % self.section.replay_every:
            return
        parts = trainer.train_step.model_parts
        with self._deterministic():
            one, two = (bits_of(parts, lambda: self._passes(batches)) for _ in range(2))
        found = first_difference(one, two)
        mine = None if found is None else (*found, trainer.rank, platform.node())
        of_all: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(of_all, mine)
        if not (text := describe(of_all)):
            return
        text = f"replay before step {trainer.step}: {text}"
        if self.section.on_replay_mismatch == "stop":
            raise BitsError(f"{text}. Its device or memory is broken, or {_ORDER}")
        trainer.announce(f"{text}. TRAINED ON")

    def _passes(self, batches: Sequence[TensorBatch]) -> None:
        """Run the forward and backward pass of the first micro-batch, as the step will."""
        step, trainer = self.trainer.train_step, self.trainer
        (model,) = step.model_parts
        step.draws.begin(trainer.step)
        step.compute_scales()
        step.balance.begin(
            num_sequences=trainer.sequences_per_step, num_tokens=trainer.tokens_per_step
        )
        if step.compile_log is not None:
            torch.compiler.cudagraph_mark_step_begin()
        batch = step.to_local(batches[0])
        step.prepare_backward(model, is_last=True)
        loss = step.loss_sum(model(batch.input, **batch.inputs), batch.targets)
        (loss / batch.input.numel()).backward()

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Use deterministic algorithms within the context. Compiled programs keep theirs, since a switch would compile others."""
        before = torch.are_deterministic_algorithms_enabled()
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        if self.trainer.train_step.compile_log is None and not before:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn)


_ORDER = (
    "an operation adds up in another order each time: debug.deterministic = true rules that out"
)


def hook(trainer: RunProgress) -> Replay | None:
    """Return the hook of a run with `fault_tolerance.replay_every`."""
    return Replay(trainer) if trainer.config.fault_tolerance.replay_every else None
