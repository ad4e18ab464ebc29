"""Flux.1, a diffusion transformer. `FLAVORS` names the sizes. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .config import FLAVORS, FluxConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import Flux

__all__ = ["FLAVORS", "TASK", "TENSOR_PLAN", "FluxConfig", "build_model"]

TASK = "flow_matching"  # of titan/tasks, unless the job names another


def build_model(config: FluxConfig) -> Flux:
    """Return the module for a size; build it under `torch.device("meta")` to allocate nothing."""
    from .model import Flux

    return Flux(config)


def shrink(config: FluxConfig) -> dict[str, Any]:
    """Return the keys of a small job, for `titan certify`: a patch, its channels and the length of a sample belong together."""
    small = {k: v for k, v in asdict(FLAVORS["tiny"]).items() if type(v) is int}
    return {
        "model.flavor": "tiny",
        "model.overrides": {**small, "guidance_embed": config.guidance_embed},
        "task.options": {
            "source": "shapes",
            "size": 16,
            "channels": 1,
            "patch": 4,
            "context_len": 4,
        },
        "training.seq_len": 20,
    }
