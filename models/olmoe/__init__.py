"""OLMoE 1B-7B: a Llama of many small experts, with norms of queries and keys over all heads. Built on models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, OlmoeConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from ..llama3.model import Llama

__all__ = ["FLAVORS", "TENSOR_PLAN", "OlmoeConfig", "build_model"]


def build_model(config: OlmoeConfig) -> Llama:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from ..llama3.model import Llama
    from .model import Attention

    return Llama(config, attention=Attention)
