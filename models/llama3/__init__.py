"""Llama 3, 3.1 and 3.2. `FLAVORS` names the sizes, and `build_model` makes the module. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.models.common.config import LlamaConfig
from titan.models.common.plan import TENSOR_PLAN

from .config import FLAVORS

if TYPE_CHECKING:
    from .model import Llama

__all__ = ["FLAVORS", "TENSOR_PLAN", "LlamaConfig", "build_model"]


def build_model(config: LlamaConfig) -> Llama:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Llama

    return Llama(config)
