"""Recovery from steps whose loss is not finite or far off: train, skip, rewind or stop.

A loss is far off if its robust z-score among the losses before it is high (titan/base/spikes.py).

    skip      no update by this step; its samples are used up
    rewind    back to the newest checkpoint, and on without the samples that led here (PaLM, arXiv:2204.02311, section 5.1)

Every rank decides before the step updates the weights. The ranks agree by a maximum, so that all
act alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.async_scalars import AsyncScalars
from titan.base.failure import RunFailure
from titan.base.spikes import spike_score
from titan.config.schema import FaultToleranceSection


class StepAction(IntEnum):
    """Action for a step, in order of severity. The ranks take the most severe action."""

    TRAIN = 0
    WARN = 1
    SKIP = 2
    REWIND = 3
    STOP = 4


_ACTIONS = {"off": StepAction.TRAIN} | {action.name.lower(): action for action in StepAction}


class NonFiniteError(RunFailure):
    """Error: a loss or gradient norm is not finite. The message names the step, the ranks and the samples."""

    kind = "loss_not_finite"


class SpikeError(RunFailure):
    """Error: a loss is far off and the policy is to stop, or too many losses were far off.

    The message has the z-score.
    """

    kind = "loss_not_finite"


@dataclass(frozen=True)
class StepDecision:
    """Decision about a step.

    Attributes:
        action: action for the step.
        reason: reason for people; empty for a normal step.
    """

    action: StepAction = StepAction.TRAIN
    reason: str = ""


class Recovery:
    """Decisions about the steps of one run. The training step calls `judge`.

    Attributes:
        section: config section [fault_tolerance].
        device: device of the loss.
        losses: newest losses of steps that updated the weights.
        decision: result of the last call of `judge`.
        has_scale: whether the loss has a scale, as in float16.
        num_skipped: skipped steps of the run.
        num_rewinds: rewinds of this start.
        skipped_in_a_row: skipped steps since the last other step.
    """

    def __init__(
        self, section: FaultToleranceSection, *, device: torch.device, has_scale: bool = False
    ) -> None:
        self.section, self.device, self.has_scale = section, device, has_scale
        self.losses = deque[float](maxlen=section.spike_window)
        self.decision = StepDecision()
        self.num_skipped = self.num_rewinds = self.skipped_in_a_row = 0

    @property
    def is_on(self) -> bool:
        """Return whether steps have to be judged. The host then waits for the results of each step."""
        stops = self.section.on_nonfinite == "stop" and self.section.on_spike == "off"
        return self.has_scale or not stops

    def judge(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Decide whether to update the weights. All ranks call it together.

        Args:
            loss: scalar on the device.
            grad_norm: scalar on the device.

        Returns:
            Whether to update the weights.
        """
        self.decision = self.decide(*AsyncScalars([loss, grad_norm]).values())
        # The most severe action of all ranks, by the order in StepAction.
        agreed = torch.tensor(float(self.decision.action), device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        [action] = AsyncScalars([agreed]).values()
        # This rank's own loss gave no reason.
        if action != self.decision.action:
            self.decision = StepDecision(StepAction(int(action)), "another rank decided so")
        self._count()
        return self.decision.action <= StepAction.WARN

    def state_dict(self) -> dict[str, Any]:
        """Return the loss window and the counters, as JSON values."""
        return {
            "losses": list(self.losses),
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loss window and the counters from a checkpoint."""
        self.losses = deque(state.get("losses", []), maxlen=self.section.spike_window)
        self.num_skipped = state.get("num_skipped", 0)
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)

    def decide(self, loss: float, grad_norm: float) -> StepDecision:
        section = self.section
        # The scale of the loss was too large, and is lower already (titan/step/loss_scale.py).
        if self.has_scale and math.isfinite(loss) and not math.isfinite(grad_norm):
            reason = f"loss {loss:.4f}, gradients overflow float16: half the loss scale"
            return StepDecision(StepAction.SKIP, reason)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return StepDecision(
                _ACTIONS[section.on_nonfinite], f"loss {loss}, gradient norm {grad_norm}"
            )
        # A score among too few losses means nothing.
        score = (
            spike_score(loss, self.losses) if len(self.losses) >= section.spike_min_steps else 0
        )
        if section.on_spike == "off" or score <= section.spike_threshold:
            self.losses.append(loss)
            return StepDecision()
        action = _ACTIONS[section.on_spike]
        # The step is trained on, so its loss counts for the steps after it.
        if action == StepAction.WARN:
            self.losses.append(loss)
        return StepDecision(
            action,
            f"loss {loss:.4f} is {score:.1f} deviations above {median(self.losses):.4f}, the median of the "
            f"{len(self.losses)} before it (gradient norm {grad_norm:.4g})",
        )

    def _count(self) -> None:
        """Count skips and rewinds. If too many steps fail, stop the run."""
        section, decision, limit = self.section, self.decision, ""
        if decision.action == StepAction.SKIP:
            self.num_skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > section.max_skips:
                limit = f"fault_tolerance.max_skips = {section.max_skips} skipped in a row"
        else:  # a step that is trained on, or a rewind, ends a row of skips
            self.skipped_in_a_row = 0
        if decision.action == StepAction.REWIND:
            self.num_rewinds += 1
            if self.num_rewinds > section.max_rewinds:
                limit = f"fault_tolerance.max_rewinds = {section.max_rewinds}"
        if limit:
            reason = f"{decision.reason}, after {limit}"
            self.decision = StepDecision(StepAction.STOP, reason)
