"""Building the optimizer from its section: matrices are decayed, norms and biases are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan.config.sections import AdamSection, AdamWSection, OptimizerSection

_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def parameter_groups(
    parameters: Iterable[nn.Parameter], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups: those with two or more dimensions, decayed, and the vectors, not decayed."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    section: OptimizerSection, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer a section asks for. A section registered by a third party builds its own:
    it has a method `build(parameters) -> torch.optim.Optimizer`.
    """
    if not isinstance(section, AdamWSection | AdamSection):
        return section.build(parameters)
    return _CLASSES[section.name](
        parameter_groups(parameters, weight_decay=section.weight_decay),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=section.implementation == "fused",
        foreach=section.implementation == "foreach",
    )
