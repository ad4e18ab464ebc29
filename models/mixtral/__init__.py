"""Mixtral 8x7B and 8x22B: Llama with experts in all blocks, built on the parts of models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, MixtralConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from ..llama3.model import Llama

__all__ = ["FLAVORS", "TENSOR_PLAN", "MixtralConfig", "build_model"]


def build_model(config: MixtralConfig) -> Llama:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from ..llama3.model import Llama

    return Llama(config)
