"""Qwen3's difference from Llama: each head's queries and keys are normalized before the rotation.

B batch, S sequence, D model, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from torch import Tensor, nn

from titan.models.common.config import LlamaConfig
from titan.models.llama3.model import Attention as LlamaAttention


class Attention(LlamaAttention):
    """Llama's attention with an RMSNorm over each head's queries and keys (arXiv:2505.09388, section 2)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def heads(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, S, H, K), keys and values (B, S, G, K)."""
        q_BSHK, k_BSGK, v_BSGK = super().heads(x_BSD)
        return self.q_norm(q_BSHK), self.k_norm(k_BSGK), v_BSGK
