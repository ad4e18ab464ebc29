"""Hook that compares the weights of replicas bit for bit.

It runs every `fault_tolerance.check_replicas_every_n_steps`.
"""

from __future__ import annotations

from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

from .replicas import require_equal_replicas


class ReplicaCheck(Hook):
    """Check of replicas. All ranks raise ReplicaError if replicas differ."""

    priority = 20

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.every = trainer.config.fault_tolerance.check_replicas_every_n_steps

    def updated(self, report: StepReport) -> None:
        if self.every and self.trainer.step % self.every == 0:
            try:
                require_equal_replicas(self.trainer.train_step.model_parts)
            except ValueError as error:  # on all ranks: the layout has no replicas
                text = f"fault_tolerance.check_replicas_every_n_steps = {self.every}: {error}"
                self.trainer.console.message(text, always=True)
                self.every = 0
