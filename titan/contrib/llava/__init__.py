"""LLaVA 1.5: a Llama that reads pictures, whose encoded patches take the place of tokens. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .config import FLAVORS, LlavaConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Llava

__all__ = ["FLAVORS", "TASK", "TENSOR_PLAN", "LlavaConfig", "build_model"]

TASK = "image_text"  # of titan/tasks, unless the job names another


def build_model(config: LlavaConfig) -> Llava:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Llava

    return Llava(config)


def shrink(sizes: LlavaConfig, n_layers: int | None = None) -> dict[str, Any]:
    """Return the keys of a small model: pictures and patches have to fit each other and the sequence."""
    small = {k: v for k, v in asdict(FLAVORS["tiny"]).items() if type(v) is int}
    return {"model.overrides": small | ({"n_layers": n_layers} if n_layers else {})}
