"""OLMoE's difference from Llama: queries and keys are normalized before the rotation, over all heads together.

B batch, S sequence, D model, H query heads, G key/value heads, K head dim, E = all heads' channels
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..llama3.model import Attention as LlamaAttention
from .config import OlmoeConfig


class WidthNorm(nn.Module):
    """RMSNorm over the last dimension, in operations that also work if that dimension is split over ranks."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_BSE: Tensor) -> Tensor:
        wide_BSE = x_BSE.float()
        scale_BS1 = torch.rsqrt(wide_BSE.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BSE * scale_BS1).to(x_BSE.dtype) * self.weight


class Attention(LlamaAttention):
    """Llama's attention with norms over all queries and over all keys of a token."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__(config)
        self.q_norm = WidthNorm(config.n_heads * config.head_dim, eps=config.norm_eps)
        self.k_norm = WidthNorm(config.n_kv_heads * config.head_dim, eps=config.norm_eps)

    def heads(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BSE, k_BSE = self.q_norm(self.wq(x_BSD)), self.k_norm(self.wk(x_BSD))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q_BSE, k_BSE, self.wv(x_BSD)))
        return q, k, v
