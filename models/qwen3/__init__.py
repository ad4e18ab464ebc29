"""Qwen3, dense and with experts, built on the parts of models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.models.common.plan import TENSOR_PLAN

from .config import FLAVORS, Qwen3Config

if TYPE_CHECKING:
    from titan.models.llama3.model import Llama

__all__ = ["FLAVORS", "TENSOR_PLAN", "Qwen3Config", "build_model"]


def build_model(config: Qwen3Config) -> Llama:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from titan.models.llama3.model import Llama

    from .model import Attention

    return Llama(config, attention=Attention)
