"""Sizes of DeepSeek-V3 (arXiv:2412.19437), V2 and V2-Lite (arXiv:2405.04434). Imports no torch.

The numbers come from the models' config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titan.models.common.config import read_flavors
from titan.models.common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(MoEConfig):
    """Sizes of DeepSeek: the fields of MoEConfig, and of multi-head latent attention (MLA).

    Each query head has its own keys and values.

    Attributes:
        q_lora_rank: Width of the latent of queries. 0: queries are projected from the input.
        kv_lora_rank: Width of the latent of keys and values.
        qk_nope_head_dim: Channels of a query or key head without rotation.
        qk_rope_head_dim: Channels with rotation. All heads share those of the keys.
        v_head_dim: Channels of a value head.
        rope_factor: Factor of YaRN (arXiv:2309.00071). 0: none, as in pretraining.
        rope_mscale: With YaRN, the scale of attention is multiplied by (0.1 rope_mscale ln(rope_factor) + 1)^2.
        original_context: Context in tokens that YaRN stretches.
    """

    n_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = 102400
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_factor: float = 40.0
    rope_mscale: float = 1.0
    original_context: int = 4096

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_kv_heads", self.n_heads)
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scores of queries and keys."""
        # YaRN's temperature: attention over a stretched context is sharpened with the factor's logarithm.
        stretch = math.log(self.rope_factor) if self.rope_factor else 0.0
        return self.head_dim**-0.5 * (0.1 * self.rope_mscale * stretch + 1) ** 2

    @property
    def num_attention_params(self) -> int:
        queries = self.n_heads * self.head_dim
        if self.q_lora_rank:
            queries_params = self.q_lora_rank * (self.dim + queries)
        else:
            queries_params = self.dim * queries
        # Keys' channels without rotation, and values, are projected from the latent.
        made_of_latent = self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        to_latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        output = self.n_heads * self.v_head_dim * self.dim
        return queries_params + to_latent + self.kv_lora_rank * made_of_latent + output

    @property
    def num_block_norm_params(self) -> int:
        return 2 * self.dim + self.q_lora_rank + self.kv_lora_rank

    def attention_flops_per_token(self, seq_len: int, *, causal: bool) -> int:
        sizes = self.head_dim + self.v_head_dim
        return (3 if causal else 6) * self.num_blocks * self.n_heads * sizes * seq_len


# "tiny" is titan's own, with all that V3 has; "debugmodel" is TorchTitan v0.2.2's; "16B" is V2-Lite, "236B" V2 and "671B" V3. The
# released V3 also has num_mtp_modules = 1. V2 balances loads by a loss of each sequence (aux_loss_alpha and seq_aux in its config.json).
FLAVORS = read_flavors(__file__, DeepSeekConfig)
