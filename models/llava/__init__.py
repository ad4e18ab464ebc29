"""Provide LLaVA 1.5: a picture's patches, encoded and projected, stand for tokens of a Llama. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import FLAVORS, LlavaConfig, TaskOptions
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Llava
    from .task import DescribePictures

__all__ = ["FLAVORS", "TENSOR_PLAN", "LlavaConfig", "TaskOptions", "build_model", "build_task"]


def build_model(config: LlavaConfig) -> Llava:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Llava

    return Llava(config)


def build_task(config: Any, options: TaskOptions) -> DescribePictures:
    """Return the task."""
    from .task import DescribePictures

    return DescribePictures(config, options)
