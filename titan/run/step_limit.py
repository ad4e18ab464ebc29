"""Hook that ends the run if a step takes longer than `fault_tolerance.step_timeout_seconds`."""

from __future__ import annotations

from titan.run.hook import Hook
from titan.run.progress import RunProgress


class StepLimit(Hook):
    """Time limit of steps, kept by the run's supervisor. Validation and saving are not limited."""

    priority = 0  # the first hook, so that it times the work of all others in a step

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer

    def step_begin(self) -> None:
        trainer = self.trainer
        # The very first step also connects to other ranks.
        set_up_s = trainer.config.comm.init_timeout_seconds if trainer.compiles_this_step else 0
        trainer.supervisor.beat(trainer.step, extra_s=set_up_s)

    def step_end(self) -> None:
        self.trainer.supervisor.beat()

    rewound = step_end
