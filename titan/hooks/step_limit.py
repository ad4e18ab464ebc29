"""Hook that ends the run if a step takes longer than `fault_tolerance.step_timeout_seconds`."""

from __future__ import annotations

from titan.health.monitor import Monitor
from titan.hook import Hook, RunContext


class StepLimit(Hook):
    """Time limit of steps, kept by the monitor. Validation and saving are not limited."""

    def __init__(self, trainer: RunContext, monitor: Monitor | None) -> None:
        self.trainer = trainer
        self.monitor = monitor or Monitor(trainer.run_dir)  # not started, so it does not watch

    def step_begin(self) -> None:
        trainer = self.trainer
        # The first step of the run and of each phase compiles, and the very first connects to other ranks.
        is_first = trainer.step in {trainer.first_step, *(p.first_step for p in trainer.phases)}
        set_up_s = trainer.config.comm.init_timeout_seconds if is_first else 0
        self.monitor.begin(trainer.step, extra_s=set_up_s)

    def step_end(self) -> None:
        self.monitor.end()

    rewound = step_end
