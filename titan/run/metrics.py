"""Hook for metrics: a row at logged steps, and a line on the console.

Rows go to metrics.jsonl, TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from titan.base.rows import Row
from titan.config.phases import Phase
from titan.observe.columns import empty_row
from titan.observe.flops import flops_by_dtype, flops_per_token, model_tflops, utilization
from titan.observe.memory import peak_memory
from titan.observe.metrics import MetricsLog, finite
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.run.validation import Validation

_STATUS_S = 2.0  # seconds between writes of status.json: a rename may wait for the disk, as long as some steps of a small model


class Metrics(Hook):
    """Rows of metrics, with the columns of all hooks.

    The row of a step is in the checkpoint of the step. A run that is killed after the save and before the row continues with that row.

    Attributes:
        log: sinks of this rank; None before `start`.
        losses: finite losses since the last row.
        row: the newest row.
    """

    priority = 910
    state_key = "metrics"

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.log: MetricsLog | None = None
        self.losses: list[float] = []
        self.row: Row = {}
        self.newest_step = -1  # whose numbers have reached the host
        self.status_s = -math.inf  # time of the last write

    def start(self) -> None:
        trainer = self.trainer
        self.since_step, self.since_tokens = trainer.step, trainer.tokens_seen
        self.losses.clear()
        self.saved_s = 0.0  # seconds of saves in the rows of this start
        self.log = MetricsLog(
            trainer.run_dir,
            section=trainer.config.metrics,
            rank=trainer.rank,
            resume_step=trainer.step,
            resume_row=self.row,
            job_config=trainer.config.whole.model_dump(),
        )

    def rewound(self) -> None:
        """Open the files again at the earlier step, which cuts the rows of the steps that are repeated."""
        self.close()
        self.start()

    def needs_results(self) -> bool:
        return self.trainer.logs_this_step

    def result(self, result: StepResult) -> None:
        self.newest_step = result.step
        # A step that was skipped may have any loss.
        if math.isfinite(result.loss):
            self.losses.append(result.loss)

    def step_end(self) -> None:
        trainer = self.trainer
        trainer.console.advance(trainer.step)
        if not self._make_row():
            return
        assert self.log is not None
        validation, row = trainer.hook(Validation), self.row
        # With the save of this step, which came after its row was made.
        saved_s = trainer.timer.total_s["checkpoint"]
        row["checkpoint_s"], self.saved_s = saved_s - self.saved_s, saved_s
        self.log.write(row)
        trainer.console.step(row)
        if "validation_loss" in row:
            trainer.console.validation(row)
        if validation is not None and validation.row and validation.texts:
            self.log.write_texts(trainer.step, validation.texts)
        if time.monotonic() - self.status_s > _STATUS_S:
            trainer.write_status()
            self.status_s = time.monotonic()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def state_dict(self) -> dict[str, Any]:
        has_row = self.log is not None and self._make_row()
        return {"row": finite(self.row) | {"unix_s": round(time.time(), 3)}} if has_row else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        row = state.get("row")
        self.row = row if isinstance(row, dict) else {}

    def _make_row(self) -> bool:
        """Make the row of this step, unless it exists. Return whether the step has a row."""
        trainer = self.trainer
        if self.row.get("step") == trainer.step:
            return True
        # A step whose numbers have not reached the host is not over.
        has_row = self.newest_step == trainer.step and (
            trainer.logs_this_step or any(hook.validates() for hook in trainer.hooks)
        )
        if has_row:
            self.row = self._row()
        return has_row

    def _row(self) -> Row:
        """Return the row of this step, with the columns of all hooks."""
        trainer, result = self.trainer, self.trainer.result
        # The window covers all steps since the last row.
        tokens = trainer.tokens_seen - self.since_tokens
        self.since_step, self.since_tokens = trainer.step, trainer.tokens_seen
        loss_mean = fmean(self.losses) if self.losses else math.nan
        self.losses.clear()
        flops_per_token, phase = self._flops_per_token(trainer.phase), trainer.phase
        # Remaining steps, in units of a step of this phase.
        flops = [p.tokens_per_step * self._flops_per_token(p) for p in trainer.phases]
        left = (p.steps_after(trainer.step) for p in trainer.phases)
        flops_left = sum(steps * each for steps, each in zip(left, flops, strict=True))
        steps_left = flops_left / flops[phase.number - 1]
        window = trainer.timer.window(step=trainer.step, tokens=tokens, steps_left=steps_left)
        tflops = model_tflops(
            tokens_per_s=window.tokens_per_s,
            flops_per_token=flops_per_token,
            num_ranks=trainer.world_size,
        )
        # Reset, so that each row has the peak of its own steps.
        memory = peak_memory(reset=True)
        dtype = trainer.config.training.compute_dtype
        peak_flops = trainer.hardware.peak_flops.get(dtype) if trainer.hardware else None
        row = empty_row() | {
            "step": trainer.step,
            "loss": result.loss,
            "loss_mean": loss_mean,
            "grad_norm": result.grad_norm,
            "lr": trainer.train_step.optimizer.param_groups[0]["lr"],
            "tokens": trainer.tokens_seen,
            "tokens_per_s": window.tokens_per_s,
            "step_s": window.step_s,
            "eta_s": window.eta_s,
            "data_wait_s": window.data_wait_s,
            "memory_gib": memory.reserved_gib,
            "memory_active_gib": memory.active_gib,
            "memory_kind": memory.kind,
            "tflops": tflops,
            "mfu": tflops * 1e12 / peak_flops if peak_flops else None,
            "mfu_dtype": dtype if peak_flops else None,
            "utilization": utilization(
                flops_by_dtype(phase.config, trainer.sizes, trainer.train_step.float8),
                trainer.hardware.peak_flops if trainer.hardware else {},
                tokens_per_s=window.tokens_per_s,
                num_ranks=trainer.world_size,
            ),
            "mfu_convention": trainer.config.metrics.mfu_convention,
            "validation_s": window.paused_s.get("validation", 0.0),
            "checkpoint_s": trainer.timer.total_s["checkpoint"] - self.saved_s,
        }
        if (scale := trainer.train_step.loss_scale) is not None:
            row["loss_scale"] = scale.value
        row |= trainer.train_step.group_sums.columns(result.groups, prefix="source")
        for hook in trainer.hooks:
            row |= hook.columns(window, result)
        return row

    def _flops_per_token(self, phase: Phase) -> float:
        """Return the FLOPs of a token, which grow with the length of the sequences."""
        causal = phase.config.metrics.mfu_convention == "causal"
        return flops_per_token(phase.config, self.trainer.sizes, causal=causal)
