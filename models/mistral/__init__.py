"""Mistral 7B: Llama with a sliding window over the keys, built on the parts of models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.plan import TENSOR_PLAN
from .config import FLAVORS, MistralConfig

if TYPE_CHECKING:
    from ..llama3.model import Llama

__all__ = ["FLAVORS", "TENSOR_PLAN", "MistralConfig", "build_model"]


def build_model(config: MistralConfig) -> Llama:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from ..llama3.model import Llama

    return Llama(config)
