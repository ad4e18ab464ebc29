"""Attention as its formula says, for every kernel and every layout to be compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan.parallel.block_attention import AttentionSpec


def plain_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    ids: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scores and sink) @ values, written out for each pair of a query and a key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * (scale or 1 / math.sqrt(q.shape[-1]))
    query, key = (torch.arange(x.shape[2]) for x in (q, k))
    seen = torch.ones(len(query), len(key), dtype=torch.bool)
    if spec.causal:
        seen = key <= query[:, None]
    if spec.window:
        seen = seen & (key > query[:, None] - spec.window)
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1] @ v
    return torch.softmax(scores, dim=-1) @ v
