"""DeepSeek's differences from Llama: multi-head latent attention (MLA, arXiv:2405.04434, section 2.1), and YaRN.

Queries, and keys and values, are projected from latents, which are narrow vectors for each token. Some channels of each
head rotate with the position. The rotating channels of the keys come from the token itself, and all heads share them.

B batch, S sequence, D model, H heads, K head dim of queries and keys, N and R its channels without and with rotation, L latent,
E = all heads' channels
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention
from titan.models.common.rotary import rotate_pairs, yarn_frequencies
from titan.models.llama3.model import Llama

from .config import DeepSeekConfig

# Published models use this epsilon whatever their rms_norm_eps.
_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention: projections to and from latents, and rotation, around the inner attention."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        q_dim = config.n_heads * config.head_dim
        if rank := config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, rank, bias=False)
            self.q_norm = nn.RMSNorm(rank, eps=_LATENT_EPS)
            self.wq_b = nn.Linear(rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(config.dim, q_dim, bias=False)
        rank, kv_dim = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
        self.wkv_a = nn.Linear(config.dim, rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(rank, eps=_LATENT_EPS)
        self.wkv_b = nn.Linear(rank, config.n_heads * kv_dim, bias=False)
        # Tensor parallelism, whose ranks hold some of the heads each, wraps this module.
        self.shared_keys = nn.Identity()
        self.wo = nn.Linear(config.n_heads * config.v_head_dim, config.dim, bias=False)
        self.inner_attention = InnerAttention(scale=config.softmax_scale)

    def forward(
        self, x_BSD: Tensor, cos_sin: tuple[Tensor, Tensor], document_ids_BS: Tensor | None
    ) -> Tensor:
        """Return the layer's output, (B, S, D). The arguments are those of Llama's `Attention`."""
        config = self.config
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        has_latent = config.q_lora_rank > 0
        q_BSE = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if has_latent else self.wq(x_BSD)
        kv_BSL, k_BSR = self.wkv_a(x_BSD).split([config.kv_lora_rank, rope], dim=-1)
        q_BSHN, q_BSHR = _heads(q_BSE, nope, rope)
        k_BSHN, v_BSHK = _heads(self.wkv_b(self.kv_norm(kv_BSL)), nope, value)
        k_BSHR = rotate_pairs(self.shared_keys(k_BSR)[:, :, None], cos_sin)
        # One rotated key for all heads: a view, which the concatenation below copies.
        k_BSHR = k_BSHR.expand(-1, -1, k_BSHN.shape[2], -1)
        q_BSHK = torch.cat([q_BSHN, rotate_pairs(q_BSHR, cos_sin)], dim=-1)
        k_BSHK = torch.cat([k_BSHN, k_BSHR], dim=-1)
        q_BHSK, k_BHSK, v_BHSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
        o_BHSK = self.inner_attention(q_BHSK, k_BHSK, v_BHSK, document_ids_BS)
        return self.wo(o_BHSK.transpose(1, 2).flatten(-2))


def _heads(x_BSE: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split E channels into heads (B, S, H, ...) and each head into parts of these sizes."""
    # -1 for the number of heads: under tensor parallelism each rank holds some of them.
    return x_BSE.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)


class DeepSeek(Llama):
    """Decoder of DeepSeek, from token ids to logits."""

    config: DeepSeekConfig

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config, attention=LatentAttention)

    def frequencies(self, device: torch.device) -> Tensor:
        return yarn_frequencies(self.config, self.config.qk_rope_head_dim, device)
