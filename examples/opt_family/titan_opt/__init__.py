"""OPT (arXiv:2205.01068) as a model family in a separate package: what titan asks of one, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FLAVORS, OPTConfig
from .plan import TENSOR_PLAN

if TYPE_CHECKING:
    from .model import OPT

__all__ = ["FLAVORS", "TENSOR_PLAN", "OPTConfig", "build_model"]


def build_model(config: OPTConfig) -> OPT:
    """Return the module for a size. Only this imports torch, so that job files are checked without it."""
    from .model import OPT

    return OPT(config)
