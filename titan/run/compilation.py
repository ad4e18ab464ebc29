"""Hook for compilation: its report, and time limits of collectives.

Limits are longer while a rank compiles or connects.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from titan.parallel.torch_compat import set_timeout, start_compile_workers
from titan.run.checkpointing import Checkpointing
from titan.run.hook import Hook
from titan.run.progress import RunProgress

_LOG = logging.getLogger("titan")


class Compilation(Hook):
    """Compiler of a run, and the time limits of collectives.

    It starts the compiler's processes, sets limits, reports once after the first step, and warns of
    recompilations at logged steps.
    """

    priority = 70

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self._seconds = (
            trainer.config.comm.init_timeout_seconds
        )  # the limit at the trainer's start
        section = trainer.config.compile
        if section.enable and section.backend == "inductor":
            start_compile_workers()

    def step_begin(self) -> None:
        """Set the limit of a step.

        The first step of the run and of each phase compiles, and gets the longer limit.
        """
        self._limit(is_long=self.trainer.compiles_this_step)

    def step_end(self) -> None:
        trainer = self.trainer
        # The first step of this start, also after a resume.
        if trainer.step == trainer.first_step:
            self._after_first_step()
        # Validations run after this hook, and may compile, too.
        self._limit(is_long=any(hook.validates() for hook in trainer.hooks))
        log = trainer.train_step.compile_log
        if log is not None and trainer.logs_this_step:
            for warning in log.warnings():
                _LOG.warning(f"step {trainer.step}: {warning}")

    def _limit(self, *, is_long: bool) -> None:
        """Set the limit of all groups. If no rank connects or compiles, a slow collective hangs."""
        trainer, comm = self.trainer, self.trainer.config.comm
        seconds = comm.init_timeout_seconds if is_long else comm.train_timeout_seconds
        if seconds != self._seconds:
            self._seconds, saves = seconds, trainer.hook(Checkpointing)
            # Checkpoints keep their own limit: a save waits for the slowest disk.
            set_timeout(timedelta(seconds=seconds), but_not_of=saves.group if saves else None)

    def _after_first_step(self) -> None:
        trainer = self.trainer
        if trainer.train_step.compile_log is not None:
            trainer.console.message(trainer.train_step.compile_log.summary())
        rewrites = trainer.train_step.async_tp
        if rewrites is not None:
            trainer.console.message(str(rewrites))
            if rewrites.num_graphs and not rewrites.fired:
                _LOG.warning(
                    "async TP is on, but nothing was rewritten: communication is not hidden"
                )
