"""The loss with the weight of an output layer as a tensor, for tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from titan.losses.loss import CustomLoss, LossSum


def cross_entropy_sum(
    input: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    custom: CustomLoss | None = None,
    **options: Any,
) -> Tensor:
    """Return the summed loss. The options are attributes of LossSum."""
    loss = LossSum(**options)
    return loss.scaled(input, labels, (1.0,), weight=weight, custom=custom)[0]
