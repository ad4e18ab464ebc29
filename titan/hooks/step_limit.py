"""End the run if a step takes longer than `fault_tolerance.step_timeout_seconds`."""

from __future__ import annotations

from collections.abc import Callable

from titan.health.monitor import Failure
from titan.health.watchdog import Watchdog
from titan.hook import Hook
from titan.trainer import Trainer


class StepLimit(Hook):
    """Start and stop the watchdog's clock around each step; validation and saving are not limited."""

    def __init__(self, trainer: Trainer, *, agree: Callable[[Failure], Failure]) -> None:
        self.trainer, self.agree = trainer, agree
        self.watchdog: Watchdog | None = None

    def start(self) -> None:
        trainer = self.trainer
        self.watchdog = Watchdog(
            trainer.config.fault_tolerance.step_timeout_seconds,
            run_dir=trainer.run_dir,
            rank=trainer.rank,
            world_size=trainer.world_size,
            agree=self.agree,
        )

    def step_begin(self) -> None:
        trainer = self.trainer
        is_first = trainer.step == trainer.first_step  # which compiles, and connects to other ranks
        set_up_s = trainer.config.comm.init_timeout_seconds if is_first else 0
        if self.watchdog is not None:
            self.watchdog.begin(trainer.step, extra_s=set_up_s)

    def step_end(self) -> None:
        if self.watchdog is not None:
            self.watchdog.end()

    rewound = step_end

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close()
