"""Hook that compares the weights of replicas bit for bit.

It runs every `fault_tolerance.check_replicas_every_n_steps`.
"""

from __future__ import annotations

from titan.hook import Hook, RunContext
from titan.parallel.replicas import require_equal_replicas
from titan.train_step import StepReport


class ReplicaCheck(Hook):
    """Check of replicas. All ranks raise ReplicaError if replicas differ."""

    def __init__(self, trainer: RunContext) -> None:
        self.trainer = trainer

    def updated(self, report: StepReport) -> None:
        every = self.trainer.config.fault_tolerance.check_replicas_every_n_steps
        if every and self.trainer.step % every == 0:
            require_equal_replicas(self.trainer.train_step.model_parts)
