"""Loss scale of training in float16, by the rules of torch.amp.GradScaler (arXiv:1710.03740, section 3.2).

Gradients below 6e-8 are 0 in float16, and those above 65,504 infinite. So the loss is multiplied by a scale before the backward pass,
and the reduced fp32 gradients are divided by it. A step with an infinite gradient updates nothing and halves the scale. 2,000 other
steps in a row double it. All ranks know the same global norm, so they have the same scale. It is a power of two: no bit is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from titan.optim.clipping import local_gradients

GROWTH_INTERVAL = 2000


class LossScale:
    """Dynamic loss scale.

    Attributes:
        value: factor of the loss in the next step.
        good_steps: steps with finite gradients since the scale has changed.
    """

    def __init__(self) -> None:
        self.value, self.good_steps = 65536.0, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state, as JSON values."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint, which is empty if that is of a run in another precision."""
        self.value = float(state.get("value", self.value))
        self.good_steps = int(state.get("good_steps", 0))

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        if grads := local_gradients(parameters):
            torch._foreach_mul_(grads, 1 / self.value)

    def update(self, grad_norm: float) -> bool:
        """Adapt the scale after a step. Return whether the step may update the weights."""
        is_finite = math.isfinite(grad_norm)
        self.good_steps = (self.good_steps + 1) * is_finite
        if not is_finite:
            self.value /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
        return is_finite
