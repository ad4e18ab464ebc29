"""Sizes of OLMoE (arXiv:2409.02060 and the model's config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    """Sizes of OLMoE: the fields of MoEConfig, with norms of queries and keys over all heads together."""

    vocab_size: int = 50304
    rope_theta: float = 10_000.0
    # Section 2 of the paper.
    global_balance_coeff: float = 0.01
    router_z_loss_coeff: float = 0.001

    @property
    def num_block_norm_params(self) -> int:
        return 2 * self.dim + (self.n_heads + self.n_kv_heads) * self.head_dim


FLAVORS: dict[str, OlmoeConfig] = {
    # titan's own
    "tiny": OlmoeConfig(
        dim=64,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        ffn_dim=48,
        expert_dim=48,
        num_experts=8,
        top_k=3,
        vocab_size=2048,
    ),
    "1B-7B": OlmoeConfig(
        dim=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=1024,
        expert_dim=1024,
        num_experts=64,
        top_k=8,
    ),
}
