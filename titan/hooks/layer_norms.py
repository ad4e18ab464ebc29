"""Hook for gradient and weight norms of each block (titan/observe/norms.py).

It runs every `metrics.log_layer_norms_every_n_steps`.
"""

from __future__ import annotations

from titan.async_scalars import AsyncScalars
from titan.hook import Hook, RunContext
from titan.hooks.metrics import Metrics
from titan.observe.norms import LayerNorms


class LayerNormsLog(Hook):
    """Log of norms, measured between the backward pass and clipping, and written when the step is over."""

    def __init__(self, trainer: RunContext) -> None:
        self.trainer = trainer
        self.every = trainer.config.metrics.log_layer_norms_every_n_steps
        self.measured: AsyncScalars | None = None
        if self.every:
            step = trainer.train_step
            self.norms = LayerNorms(step.model_parts, stages=step.groups.stages)
            step.call_with_gradients(self._measure)

    def _measure(self) -> None:
        if self.trainer.step % self.every == 0:
            self.measured = self.norms.measure()

    def step_end(self) -> None:
        metrics = self.trainer.hook(Metrics)
        if self.measured is not None and metrics is not None and metrics.log is not None:
            metrics.log.write_norms(self.trainer.step, self.norms.row(self.measured))
        self.measured = None
