"""Hook for steps with a bad loss, not finite or far off: warn, skip, rewind or stop.

titan/ops/recovery.py decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan.base.async_scalars import AsyncScalars
from titan.observe.clock import Window
from titan.run.checkpointing import Checkpointing
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

from .recovery import NonFiniteError, Recovery, SpikeError, StepAction


class StepRecovery(Hook):
    """Judge of each step before it updates the weights, if the policy asks for it.

    Otherwise the run stops at the first non-finite loss.

    Attributes:
        recovery: decisions about steps.
        judges: whether steps are judged before their update.
        is_told: whether a step without targets was announced.
        skipped: skipped steps whose results were not read yet.
    """

    priority = 10
    state_key = "recovery"

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.recovery = Recovery(
            trainer.config.fault_tolerance,
            device=trainer.device,
            has_scale=trainer.train_step.loss_scale is not None,
        )
        # Judging needs the loss before the update, so the host waits for the device in each step.
        self.judges = self.recovery.is_on
        self.is_told = False
        self.skipped: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        return self.recovery.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recovery.load_state_dict(state)

    def accept(self, loss: Tensor, grad_norm: Tensor) -> bool:
        return self.recovery.judge(loss, grad_norm)

    def updated(self, report: StepReport) -> None:
        """Act on the decision about this step.

        Raises:
            SpikeError: the loss is far off, and the run has to stop.
            NonFiniteError: the loss or the norm is not finite, and the run has to stop.
        """
        trainer, decision = self.trainer, self.recovery.decision
        if not report.has_targets and not self.is_told:
            self.is_told = True
            trainer.announce(
                f"step {trainer.step}: no target to train on. NO UPDATE BY SUCH STEPS"
            )
        if decision.action == StepAction.TRAIN:
            return
        # The loader has counted this step's samples already.
        first_sample = trainer.loader.state_dict()["position"] - trainer.sequences_per_step
        if decision.action == StepAction.REWIND:
            return self._rewind(first_sample)
        text = f"step {trainer.step}, {self._samples(first_sample)}: {decision.reason}"
        if decision.action == StepAction.STOP:
            loss, grad_norm = AsyncScalars([report.loss, report.grad_norm]).values()
            self._require_finite(
                StepResult(trainer.step, first_sample, report, loss, grad_norm)
            )
            raise SpikeError(
                f"{text}. {self._saved()}; see {trainer.audit_command(trainer.step)}"
            )
        done = "TRAINED ON"
        if decision.action == StepAction.SKIP:
            self.skipped.add(trainer.step)
            done = "NO UPDATE BY THIS STEP"
        trainer.announce(f"{text}. {done}; see {trainer.audit_command(trainer.step)}")

    def result(self, result: StepResult) -> None:
        """Check the results of a step.

        Raises:
            NonFiniteError: they are not finite. All ranks raise it in the same step.
        """
        # A skipped step may have any loss.
        if result.step in self.skipped:  # it did not change the weights
            self.skipped.remove(result.step)
        else:
            self._require_finite(result)

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return {
            "num_skipped": self.recovery.num_skipped,
            "num_rewinds": self.recovery.num_rewinds,
        }

    def rewound(self) -> None:
        self.skipped.clear()

    def _rewind(self, first_sample: int) -> None:
        """Load the newest checkpoint, and continue without the samples of the last steps before the failure."""
        trainer, reason = self.trainer, self.recovery.decision.reason
        failed_at = trainer.step
        checkpointing = trainer.hook(Checkpointing)
        path = checkpointing.load_newest() if checkpointing is not None else None
        if path is None or trainer.changes_layout:
            of = " of this layout" if path else ""
            text = f"step {failed_at}: {reason}, and there is no checkpoint{of} to rewind to"
            raise NonFiniteError(text)
        # Skip the samples of the steps that led here, at most the samples since the checkpoint.
        end = first_sample + trainer.sequences_per_step
        most = trainer.config.fault_tolerance.rewind_steps * trainer.sequences_per_step
        # Start at the checkpoint's position or later: the run has trained on earlier samples already.
        first = max(trainer.loader.state_dict()["position"], end - most)
        trainer.loader.skip(first, end)
        trainer.announce(
            f"step {failed_at}: {reason}. BACK TO STEP {trainer.step}, ON WITHOUT SAMPLES {first} TO {end - 1}"
        )
        trainer.rewind(failed_at=failed_at)

    def _samples(self, first: int) -> str:
        return f"samples {first} to {first + self.trainer.sequences_per_step - 1}"

    def _require_finite(self, result: StepResult) -> None:
        """Raise NonFiniteError unless loss and norm are finite.

        Every rank reads the same values, so all ranks raise together.
        """
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return
        # The loss is a sum over ranks, so every rank is here and may communicate.
        trainer = self.trainer
        bad = [
            not math.isfinite(x) for x in AsyncScalars([result.report.local_losses]).values()
        ]
        by_rank: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(by_rank, (trainer.dp_rank, bad))
        size = trainer.phase.config.training.local_batch_size
        # Name the samples: the loss is a sum over ranks, but each rank still knows its micro-batches' losses.
        batches = []
        for rank, (dp_rank, flags) in enumerate(by_rank):
            for number, flag in enumerate(flags):
                if flag:
                    start = result.first_sample + (number * trainer.layout.dp + dp_rank) * size
                    batches.append(f"rank {rank}: samples {start} to {start + size - 1}")
        reason = self.recovery.decision.reason or (
            f"loss {result.loss}, gradient norm {result.grad_norm}"
        )
        where = "; ".join(batches) or (
            f"the loss is finite on every rank; {self._samples(result.first_sample)}"
        )
        raise NonFiniteError(
            f"step {result.step}: {reason} ({where}). {self._saved()}. Lower optimizer.lr, or look at these samples: "
            f"{trainer.audit_command(result.step)}"
        )

    def _saved(self) -> str:
        step = self.trainer.saved_step or self.trainer.first_step - 1
        last = f"the last checkpoint is step {step}" if step else "there is no checkpoint"
        return f"These weights are not saved; {last}"
