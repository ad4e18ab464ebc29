"""Attention with sinks: a learned logit of each head in the softmax, whose value is zero (gpt-oss).

B batch, H query heads, G key/value heads, S queries, T keys, K head dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_attention import AttentionSpec, attend, attend_backward


def attend_with_sinks(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    sinks_H: Tensor,
    *,
    spec: AttentionSpec,
    scale: float | None,
    mask_BST: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Return attention, (B, H, S, K), with a sink of each head in its softmax.

    Args:
        q_BHSK: queries.
        k_BGTK: keys.
        v_BGTK: values.
        sinks_H: logit of each head's sink.
        spec: as for `attend`.
        scale: as for `attend`.
        mask_BST: as for `attend`.
        ends: as for `attend`.
    """
    size, v_size = q_BHSK.shape[-1], v_BGTK.shape[-1]
    heads = q_BHSK, k_BGTK, v_BGTK
    if size == v_size:
        return _AttentionWithSinks.apply(*heads, sinks_H, mask_BST, ends, spec, scale)
    # Kernels take heads of one size. Zeros change no score, and those of the values are cut off.
    scale = size**-0.5 if scale is None else scale
    heads = [F.pad(x, (0, max(size, v_size) - x.shape[-1])) for x in heads]
    out = _AttentionWithSinks.apply(*heads, sinks_H, mask_BST, ends, spec, scale)
    return out[..., :v_size]


def add_sinks(out_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink of each head to the softmax of an output: a logit whose value is zero.

    Args:
        out_BHSK: output without sinks.
        lse_BHS: its logsumexp, fp32.
        sinks_H: logit of each head's sink.

    Returns:
        Output and logsumexp with sinks, in the shapes and dtypes of the inputs.
    """
    total_BHS = torch.logaddexp(lse_BHS, sinks_H[:, None].to(lse_BHS.dtype))
    out = out_BHSK * (lse_BHS - total_BHS).exp()[..., None]
    # A copy, also of the same dtype: compiled by torch 2.11, an alias that is returned and saved comes back wrong in backward.
    return out.to(out_BHSK.dtype, copy=True), total_BHS


def sinks_gradient(
    grad_BHSK: Tensor, out_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor
) -> Tensor:
    """Return the gradient of the sinks, (H,), from the output and the logsumexp over all keys and sinks."""
    share_BHS = (sinks_H[:, None] - lse_BHS).exp()  # the probability of the sink
    inner_BHS = (grad_BHSK.to(share_BHS.dtype) * out_BHSK).sum(-1)
    return -(share_BHS * inner_BHS).sum((0, 2)).to(sinks_H.dtype)


class _AttentionWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, *options: Any
    ) -> Tensor:
        mask_BST, ends, spec, scale = options
        ctx.options = {"spec": spec, "scale": scale}
        out, lse = attend(q, k, v, mask_BST=mask_BST, ends=ends, **ctx.options)
        out, lse = add_sinks(out, lse, sinks_H)
        ctx.save_for_backward(q, k, v, out, lse, sinks_H, mask_BST, ends)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks_H, mask_BST, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        masks = {"mask_BST": mask_BST, "ends": ends}
        gradients = attend_backward(grad, q, k, v, out, lse, **masks, **ctx.options)
        return *gradients, sinks_gradient(grad, out, lse, sinks_H), None, None, None, None
