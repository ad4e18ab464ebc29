"""Provide Flux.1, a diffusion transformer, and the task that trains it (flow matching). `FLAVORS` names the sizes.
Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import FLAVORS, FluxConfig
from .options import TaskOptions
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Flux
    from .task import FlowMatching

__all__ = ["FLAVORS", "TENSOR_PLAN", "FluxConfig", "TaskOptions", "build_model", "build_task"]


def build_model(config: FluxConfig) -> Flux:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Flux

    return Flux(config)


def build_task(config: Any, options: TaskOptions) -> FlowMatching:
    """Return the task of a job."""
    from .task import FlowMatching

    return FlowMatching(config, options)
