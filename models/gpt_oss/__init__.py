"""gpt-oss, 20b and 120b: windows and sinks in attention, and experts with biases. It builds on models/llama3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.models.common.plan import TENSOR_PLAN

from .config import FLAVORS, GptOssConfig

if TYPE_CHECKING:
    from .model import GptOss

__all__ = ["FLAVORS", "TENSOR_PLAN", "GptOssConfig", "build_model"]


def build_model(config: GptOssConfig) -> GptOss:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import GptOss

    return GptOss(config)
