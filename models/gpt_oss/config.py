"""Sizes of gpt-oss (arXiv:2508.10925, section 2, and the models' config.json). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.models.common.config import flavors_by
from titan.models.common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """Sizes of gpt-oss: the fields of MoEConfig, with biases everywhere, and sinks and windows in attention.

    A token's weights are the softmax over the logits of its chosen experts, which equals the softmax over all experts divided
    by the sum of the chosen ones (`normalize_weights`).

    Attributes:
        window: number of keys that a query of an even layer sees, its own included. Odd layers see all keys.
        rope_factor: factor of YaRN (arXiv:2309.00071). 0: none.
        original_context: context in tokens that YaRN stretches.
    """

    n_heads: int = 64
    n_kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = 201_088
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0
    original_context: int = 4096
    window: int = 128
    top_k: int = 4
    normalize_weights: bool = True
    moe_biases: bool = True
    swiglu_limit: float = 7.0
    global_balance_coeff: float = 0.001  # router_aux_loss_coef of transformers' GptOssConfig

    def window_of(self, layer: int) -> int:
        """Return the window of a layer's attention. 0: none."""
        return self.window if layer % 2 == 0 else 0

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scores of queries and keys. YaRN scales both by its attention factor."""
        stretch = math.log(self.rope_factor) if self.rope_factor else 0.0
        return self.head_dim**-0.5 * (0.1 * stretch + 1) ** 2

    @property
    def num_block_norm_params(self) -> int:
        """Return the number of parameters of a block outside matrices: norms, biases of attention, and sinks."""
        biases = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim + self.dim
        return 2 * self.dim + biases + self.n_heads


# All layers have experts: no feed-forward layer has the width of the third column.
_gpt_oss = flavors_by("dim n_layers ffn_dim expert_dim", GptOssConfig)
FLAVORS: dict[str, GptOssConfig] = {
    # titan's own
    "tiny": _gpt_oss(
        *(64, 4, 48, 48),
        **{"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 2048},
        **{"num_experts": 8, "top_k": 4, "window": 20, "original_context": 512},
    ),
    # TorchTitan v0.2.2's, with 201,088 tokens and experts of 2880 as well
    "debugmodel": _gpt_oss(
        *(256, 4, 2880, 2880),
        **{"num_experts": 8, "load_balance_coeff": 1e-3, "global_balance_coeff": 0.0},
    ),
    "20b": _gpt_oss(2880, 24, 2880, 2880, num_experts=32),
    "120b": _gpt_oss(2880, 36, 2880, 2880, num_experts=128),
}
