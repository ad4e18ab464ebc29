"""Sizes of Qwen3, dense and with experts (arXiv:2505.09388, table 1, and the models' config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan.models.common.config import read_flavors
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


# "tiny" and "tiny_moe" are titan's own, as Llama's of that name, and "demo_moe" for a demo; "debugmodel" and "debugmodel_moe" are
# TorchTitan v0.2.2's; the others are the paper's. No block of a model with experts has the feed-forward layer of ffn_dim.
FLAVORS = read_flavors(__file__, Qwen3Config)
