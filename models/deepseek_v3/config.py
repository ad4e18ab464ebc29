"""Sizes of DeepSeek-V3 (arXiv:2412.19437), V2 and V2-Lite (arXiv:2405.04434). Imports no torch.

The numbers come from the models' config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titan.models.common.config import flavors_by
from titan.models.common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(MoEConfig):
    """Sizes of DeepSeek: the fields of MoEConfig, and of multi-head latent attention (MLA).

    Each query head has its own keys and values.

    Attributes:
        q_lora_rank: width of the latent of queries. 0: queries are projected from the input.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: channels of a query or key head without rotation.
        qk_rope_head_dim: channels with rotation. All heads share those of the keys.
        v_head_dim: channels of a value head.
        rope_factor: factor of YaRN (arXiv:2309.00071). 0: none, as in pretraining.
        rope_mscale: with YaRN, the scale of attention is multiplied by (0.1 rope_mscale ln(rope_factor) + 1)^2.
        original_context: context in tokens that YaRN stretches.
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


# V2 balances loads by a loss of each sequence (aux_loss_alpha and seq_aux in its config.json).
_V2 = {"route_scale": 1.0, "sequence_balance_coeff": 1e-3, "num_shared_experts": 2}
_V3 = {
    "score": "sigmoid",
    "normalize_weights": True,
    "route_scale": 2.5,
    "load_balance_coeff": 1e-3,
    "sequence_balance_coeff": 1e-4,
    "num_shared_experts": 1,
}
_deepseek = flavors_by(
    "dim n_layers n_dense_layers n_heads ffn_dim num_experts top_k expert_dim", DeepSeekConfig
)
FLAVORS: dict[str, DeepSeekConfig] = {
    # titan's own, with all that V3 has
    "tiny": _deepseek(
        *(64, 4, 1, 4, 192, 8, 2, 64),
        **_V3,
        **{"num_groups": 4, "top_groups": 2, "q_lora_rank": 32, "kv_lora_rank": 24},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "vocab_size": 2048},
    ),
    # TorchTitan v0.2.2's
    "debugmodel": _deepseek(
        *(256, 6, 1, 16, 1024, 8, 3, 256),
        **{"num_shared_experts": 2, "load_balance_coeff": 1e-3},
        **{"vocab_size": 2048, "norm_eps": 1e-5, "rope_mscale": 0.7},
    ),
    # V2-Lite, V2, V3. The released V3 also has num_mtp_modules = 1.
    "16B": _deepseek(2048, 27, 1, 16, 10944, 64, 6, 1408, **_V2, rope_mscale=0.707),
    "236B": _deepseek(
        *(5120, 60, 1, 128, 12288, 160, 6, 1536),
        **{**_V2, "route_scale": 16.0, "num_groups": 8, "top_groups": 3, "group_top_k": 1},
        q_lora_rank=1536,
    ),
    "671B": _deepseek(
        *(7168, 61, 3, 128, 18432, 256, 8, 2048),
        **{**_V3, "num_groups": 8, "top_groups": 4, "q_lora_rank": 1536, "vocab_size": 129280},
    ),
}
