"""The judge itself: its reference is what Adam makes of the losses. test_convert.py holds its checkpoints against its reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan.contrib.megatron.tests.reference import MegatronRun
from titan.contrib.megatron.tests.reference import megatron as megatron


def test_the_reference_is_adam(megatron: Callable[..., MegatronRun]) -> None:
    """From one step to the next, weights move as the two moments, the rate and the decay say."""
    reference = megatron("dense").reference
    beta1, beta2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    for step in (3, 4):
        before, after = reference["state"][step - 1], reference["state"][step]
        rate = reference["steps"][step]["lr"]
        for name, weight in before["param"].items():
            mult = 0.0 if weight.ndim == 1 else 1.0
            mean = after["exp_avg"][name] / (1 - beta1**step)
            square = after["exp_avg_sq"][name] / (1 - beta2**step)
            moved = weight * (1 - rate * decay * mult) - rate * mean / (square.sqrt() + eps)
            torch.testing.assert_close(after["param"][name], moved, rtol=2e-6, atol=2e-8)
