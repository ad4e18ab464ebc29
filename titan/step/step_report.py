"""The numbers of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepReport:
    """The numbers of a step, as scalars on the device. Reading one waits for the device.

    Attributes:
        loss: mean over the valid tokens of the global batch, in nats.
        grad_norm: global gradient norm before clipping.
        num_valid: valid tokens of the global batch.
        local_losses: this rank's summed loss of each micro-batch; zeros on a pipeline stage that is not the last.
        has_targets: num_valid is above 0. Otherwise the weights were not updated.
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    local_losses: Tensor
    has_targets: bool = True
