"""Sizes of Qwen3, dense and with experts (arXiv:2505.09388, table 1, and the models' config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan.models.common.config import flavors_by
from titan.models.common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(MoEConfig):
    """Sizes of Qwen3: the fields of MoEConfig, with norms of queries and keys in each head. head_dim is not dim / n_heads."""

    vocab_size: int = 151936
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    @property
    def num_block_norm_params(self) -> int:
        """Return the number of parameters of the norms in a block."""
        # Two norms over channels, two over the channels of a head.
        return 2 * self.dim + 2 * self.head_dim


_qwen3 = flavors_by("dim n_layers n_heads ffn_dim", Qwen3Config, n_kv_heads=8)
# No block has the feed-forward layer of the fifth column.
_experts = flavors_by(
    "dim n_layers n_heads n_kv_heads ffn_dim num_experts top_k expert_dim",
    Qwen3Config,
    normalize_weights=True,
    global_balance_coeff=1e-3,
)
FLAVORS: dict[str, Qwen3Config] = {
    # titan's own, as Llama's of that name
    "tiny": _qwen3(
        64, 8, 4, 192, n_kv_heads=2, head_dim=32, vocab_size=2048, tied_embeddings=True
    ),
    # TorchTitan v0.2.2's
    "debugmodel": _qwen3(256, 8, 16, 3072, vocab_size=2048, tied_embeddings=True),
    "0.6B": _qwen3(1024, 28, 16, 3072, tied_embeddings=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied_embeddings=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied_embeddings=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
    # With experts. titan's own, then TorchTitan v0.2.2's, then those of the paper
    "tiny_moe": _experts(64, 4, 4, 2, 192, 8, 2, 64, head_dim=32, vocab_size=2048),
    "demo_moe": _experts(
        192, 4, 6, 2, 576, 8, 2, 256, head_dim=32, vocab_size=264, rope_theta=10_000.0
    ),
    "debugmodel_moe": _experts(256, 8, 16, 8, 768, 64, 8, 768, vocab_size=2048),
    "30B-A3B": _experts(2048, 48, 32, 4, 6144, 128, 8, 768),
    "235B-A22B": _experts(4096, 94, 64, 4, 12288, 128, 8, 1536),
}
