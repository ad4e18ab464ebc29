"""Write a row of metrics at logged steps: metrics.jsonl, TensorBoard, Weights & Biases, and a line on the console."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from titan.hook import Hook, StepResult
from titan.hooks.validation import Validation
from titan.observe.memory import peak_memory
from titan.observe.metrics import MetricsLog, StepRow, model_tflops
from titan.trainer import Trainer


class Metrics(Hook):
    """Collect the columns of all hooks in one row."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.log: MetricsLog | None = None
        self.losses: list[float] = []  # finite ones since the last row
        config = trainer.config
        self.flops_per_token = trainer.sizes.flops_per_token(
            config.training.seq_len, causal=config.metrics.mfu_convention == "causal"
        )

    def start(self) -> None:
        trainer = self.trainer
        self.since_step = trainer.step
        self.losses.clear()
        self.log = MetricsLog(
            trainer.run_dir,
            section=trainer.config.metrics,
            rank=trainer.rank,
            resume_step=trainer.step,
            job_config=trainer.config.model_dump(),
        )

    def rewound(self) -> None:
        """Cut the rows of the steps that are repeated: opening the files again at an earlier step does that."""
        self.close()
        self.start()

    def needs_results(self) -> bool:
        return self.trainer.logs_this_step

    def result(self, result: StepResult) -> None:
        # A step that was skipped may have any loss.
        if math.isfinite(result.loss):
            self.losses.append(result.loss)

    def step_end(self) -> None:
        trainer = self.trainer
        trainer.console.advance(trainer.step)
        validation = trainer.hook(Validation)
        row = validation.row if validation is not None else None
        if not (trainer.logs_this_step or row):
            return
        assert self.log is not None
        step_row, more = self._row()
        self.log.write(step_row, row, more)
        trainer.console.step(step_row)
        if row is not None:
            trainer.console.validation(row)
        trainer.write_status()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _row(self) -> tuple[StepRow, dict[str, Any]]:
        """Return the row of this step, and the columns that only hooks from outside know."""
        trainer, result = self.trainer, self.trainer.result
        # The window covers all steps since the last row.
        num_steps = trainer.step - self.since_step
        self.since_step = trainer.step
        loss_mean = fmean(self.losses) if self.losses else math.nan
        self.losses.clear()
        window = trainer.timer.window(step=trainer.step, tokens=num_steps * trainer.tokens_per_step)
        tflops = model_tflops(
            tokens_per_s=window.tokens_per_s,
            flops_per_token=self.flops_per_token,
            num_ranks=trainer.world_size,
        )
        # Reset, so that each row has the peak of its own steps.
        memory = peak_memory(reset=True)
        dtype = trainer.config.training.mixed_precision_param
        peak_flops = trainer.hardware.peak_flops.get(dtype) if trainer.hardware else None
        # Standard hooks fill fields of StepRow. What is left comes from hooks of other packages.
        columns: dict[str, Any] = {}
        for hook in trainer.hooks:
            columns |= hook.columns(window, result)
        known = {key: columns.pop(key) for key in list(columns) if key in StepRow.__annotations__}
        row = StepRow(
            step=trainer.step,
            loss=result.loss,
            loss_mean=loss_mean,
            grad_norm=result.grad_norm,
            lr=trainer.train_step.optimizer.param_groups[0]["lr"],
            tokens=trainer.tokens_seen,
            tokens_per_s=window.tokens_per_s,
            step_s=window.step_s,
            eta_s=window.eta_s,
            data_wait_s=window.data_wait_s,
            memory_gib=memory.reserved_gib,
            memory_active_gib=memory.active_gib,
            memory_kind=memory.kind,
            tflops=tflops,
            mfu=tflops * 1e12 / peak_flops if peak_flops else None,
            validation_s=window.paused_s.get("validation", 0.0),
            checkpoint_s=window.paused_s.get("checkpoint", 0.0),
            **known,
        )
        return row, columns
