"""Gemma 3's differences from Llama (arXiv:2503.19786).

Local layers have windows and other rotary frequencies. There are more norms, GeGLU, and scaled embeddings.

B batch, S sequence, D model, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.attention import InnerAttention
from ..common.rotary import rope_frequencies
from ..llama3.model import Block as LlamaBlock
from ..llama3.model import FeedForward, Llama
from ..qwen3.model import Attention as NormedAttention
from .config import Gemma3Config


class OffsetNorm(nn.Module):
    """RMSNorm times 1 + weight, in fp32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension, (..., size)."""
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GeGLU(FeedForward):
    """GeGLU (arXiv:2002.05202), with GELU approximated by tanh."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layer, (B, S, D) to (B, S, D)."""
        return self.w2(F.gelu(self.w1(x_BSD), approximate="tanh") * self.w3(x_BSD))


class Attention(NormedAttention):
    """Llama's attention with Gemma's norms of queries and keys, and Gemma's scale of their scores."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        self.q_norm = OffsetNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = OffsetNorm(config.head_dim, eps=config.norm_eps)
        self.inner_attention = InnerAttention(scale=config.query_pre_attn_scalar**-0.5)


class Block(LlamaBlock):
    """Block with norms before and after attention and feed-forward."""

    post_attention_norm: nn.Module
    post_ffn_norm: nn.Module

    def __init__(self, config: Gemma3Config, layer: int, **options: Any) -> None:
        super().__init__(config, layer, **options)
        for name in ("attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm"):
            setattr(self, name, OffsetNorm(config.dim, eps=config.norm_eps))
        self.feed_forward = GeGLU(config.dim, config.ffn_dim)
        self.is_local = config.is_local(layer)

    def forward(self, x_BSD: Tensor, rotations: Any, document_ids_BS: Tensor | None) -> Tensor:
        """Return the residual stream after the block, (B, S, D). `rotations` are those of global and of local layers."""
        cos_sin = rotations[self.is_local]
        attended_BSD = self.attention(self.attention_norm(x_BSD), cos_sin, document_ids_BS)
        h_BSD = x_BSD + self.post_attention_norm(attended_BSD)
        return h_BSD + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h_BSD)))


class Gemma3(Llama):
    """Decoder of Gemma 3, from token ids to logits."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config, attention=Attention, block=Block)
        self.norm = OffsetNorm(config.dim, eps=config.norm_eps)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the embeddings times sqrt(D), which is rounded to their dtype, (B, S, D)."""
        x_BSD = super().embed(tokens_BS)
        return x_BSD * x_BSD.new_full((), self.config.dim**0.5)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation per position of each pair of channels, fp32, in radians: of global layers, then of local ones."""
        config = self.config
        wide, local = (
            rope_frequencies(config.head_dim, theta, None, device)
            for theta in (config.rope_theta, config.rope_local_theta)
        )
        return torch.cat([wide / (config.rope_factor or 1.0), local])

    def rotary_cos_sin(self, *args: Any) -> Any:
        """Return cos and sin of global layers, and those of local layers, (S, 1, K) or (B, S, 1, K) each."""
        # Each half of a head has the channels of global layers, then those of local layers.
        pair = [x.unflatten(-1, (2, 2, -1)) for x in super().rotary_cos_sin(*args)]
        return [tuple(x[..., kind, :].flatten(-2) for x in pair) for kind in (0, 1)]

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial weights. Weights of norms begin at zero."""
        return 0.0 if "norm" in name else super().init_std(name)
