"""Activation checkpointing: recompute a block's activations in the backward pass rather than keep them.

    full       keep each block's input, recompute the block (arXiv:1604.06174)
    every n    full, for every n-th block only
    op         keep what is expensive to recompute, recompute the rest (selective, arXiv:2205.05198): of a block's
               matrix products every second one, counted in the order they run; attention; what came over the network

Recomputation runs the same kernels on the same inputs, so losses and gradients are the same bits.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from .shims import checkpoint_wrapper

# Kept under "op", besides matrix products: attention by any kernel, and results of collectives.
_KEPT_OPS = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)
_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


def apply_ac(
    model: nn.Module, *, container: str = "layers", every: int = 1, keep_ops: bool = False
) -> None:
    """Wrap every `every`-th block in `model.<container>` (a ModuleDict or ModuleList), in place.

    keep_ops: selective by operation. Blocks count by their place in the container, also on a pipeline stage.
    """
    blocks = model.get_submodule(container)
    for place, (name, block) in enumerate(list(blocks.named_children()), 1):
        if place % every == 0:
            settings: dict[str, Any] = {"context_fn": _selective} if keep_ops else {}
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **settings)
            blocks.register_module(name, wrapped)


def _selective() -> Any:
    """The two contexts of one block's forward pass and of its recomputation, which count matrix products alike."""
    counts: Counter[tuple[str, bool]] = Counter()

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(func).rsplit(".", 1)[0]
        if name in _MATRIX_PRODUCTS:
            counts["product", ctx.is_recompute] += 1
            keep = counts["product", ctx.is_recompute] % 2 == 1
        else:
            keep = name in _KEPT_OPS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
