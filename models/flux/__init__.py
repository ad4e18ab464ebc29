"""Flux.1, a diffusion transformer. `FLAVORS` names the sizes. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, FluxConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Flux

__all__ = ["FLAVORS", "TASK", "TENSOR_PLAN", "FluxConfig", "build_model"]

TASK = "flow_matching"  # of titan/tasks, unless the job names another


def build_model(config: FluxConfig) -> Flux:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Flux

    return Flux(config)
