"""DeepSeek-V3, V2 and V2-Lite: latent attention and mixtures of experts on top of Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, DeepSeekConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import DeepSeek

__all__ = ["FLAVORS", "TENSOR_PLAN", "DeepSeekConfig", "build_model"]


def build_model(config: DeepSeekConfig) -> DeepSeek:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import DeepSeek

    return DeepSeek(config)
