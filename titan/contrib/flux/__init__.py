"""Flux.1, a diffusion transformer. `FLAVORS` names the sizes. Importing this imports no torch."""

from __future__ import annotations

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


def shrink(sizes: FluxConfig, n_layers: int | None = None) -> dict[str, Any]:
    """Return the keys of a small model. The channels of a head stay, since `rope_axes` add up to them."""
    n_heads = 4 if sizes.head_dim <= 32 else 2
    small = {"n_layers": 4, "n_double": 2, "n_heads": n_heads, "dim": n_heads * sizes.head_dim}
    if n_layers:
        small |= {"n_layers": n_layers, "n_double": sizes.n_double}
    small |= {"ffn_dim": 4 * small["dim"]}
    small |= {n: min(getattr(sizes, n), 64) for n in ("context_dim", "pooled_dim")}
    return {"model.overrides": small}
