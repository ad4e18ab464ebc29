"""Text models of Gemma 3, built on the parts of models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, Gemma3Config
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Gemma3

__all__ = ["FLAVORS", "TENSOR_PLAN", "Gemma3Config", "build_model"]


def build_model(config: Gemma3Config) -> Gemma3:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Gemma3

    return Gemma3(config)
