"""Hook that records the steps of `debug.record_steps`, for `titan diff`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from titan.data.base import TensorBatch
from titan.numerics.recorded import FOLDER, write_step
from titan.numerics.recording import StepRecorder
from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

_LOG = logging.getLogger("titan")


class Recording(Hook):
    """Record of the steps of `debug.record_steps`, in the folder `recorded` of the run."""

    priority = 110

    def __init__(self, trainer: RunProgress) -> None:
        debug = trainer.config.debug
        self.trainer, self.steps = trainer, frozenset(debug.record_steps)
        self.recorder = StepRecorder(trainer.train_step, perturbed=debug.record_perturbed)

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        if self.trainer.step in self.steps:
            self.recorder.begin(batches)

    def updated(self, report: StepReport) -> None:
        trainer = self.trainer
        if trainer.step in self.steps:
            recorded = self.recorder.end(trainer.step, report)
            if trainer.rank == 0:
                write_step(trainer.run_dir, recorded)
                _LOG.info("recorded step %s in %s/%s", trainer.step, trainer.run_dir, FOLDER)


def hook(trainer: RunProgress) -> Recording | None:
    """Return the hook of a run with `debug.record_steps`."""
    return Recording(trainer) if trainer.config.debug.record_steps else None
