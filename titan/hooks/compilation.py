"""Report what the compiler did, and end the longer time limits of the first step."""

from __future__ import annotations

import logging
from datetime import timedelta

from titan.hook import Hook, Run
from titan.hooks.checkpointing import Checkpointing
from titan.parallel.torch_compat import set_timeout, start_compile_workers

_LOG = logging.getLogger("titan")


class Compilation(Hook):
    """Start the compiler's processes, act once after the first step, and warn of recompilations at logged steps."""

    def __init__(self, trainer: Run) -> None:
        self.trainer = trainer
        section = trainer.config.compile
        if section.enable and section.backend == "inductor":
            start_compile_workers()

    def step_end(self) -> None:
        trainer = self.trainer
        # The first step of this start, also after a resume.
        if trainer.step == trainer.first_step:
            self._after_first_step()
        log = trainer.train_step.compile_log
        if log is not None and trainer.logs_this_step:
            for warning in log.warnings():
                _LOG.warning(f"step {trainer.step}: {warning}")

    def _after_first_step(self) -> None:
        """Shorten time limits: everything is connected and compiled, so a collective that takes long now hangs."""
        trainer = self.trainer
        checkpointing = trainer.hook(Checkpointing)
        # Checkpoints keep their own limit: a save waits for the slowest disk.
        limit = timedelta(seconds=trainer.config.comm.train_timeout_seconds)
        set_timeout(limit, but_not_of=checkpointing.group if checkpointing else None)
        if trainer.train_step.compile_log is not None:
            trainer.console.message(trainer.train_step.compile_log.summary())
        rewrites = trainer.train_step.async_tp
        if rewrites is not None:
            trainer.console.message(str(rewrites))
            if rewrites.num_graphs and not rewrites.fired:
                _LOG.warning(
                    "async TP is on, but nothing was rewritten: communication is not hidden"
                )
