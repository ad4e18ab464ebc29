"""Sizes of OLMoE (arXiv:2409.02060 and the model's config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    """Hold the sizes of MoEConfig, with queries and keys normalised over all heads together."""

    vocab_size: int = 50304
    rope_theta: float = 10_000.0
    # Section 2 of the paper.
    global_balance_coeff: float = 0.01
    router_z_loss_coeff: float = 0.001

    @property
    def num_block_norm_params(self) -> int:
        return 2 * self.dim + (self.n_heads + self.n_kv_heads) * self.head_dim


def _olmoe(
    dim: int, n_layers: int, n_heads: int, width: int, experts: int, top_k: int, **rest: int
) -> OlmoeConfig:
    sizes = {"ffn_dim": width, "expert_dim": width, "num_experts": experts, "top_k": top_k}
    return OlmoeConfig(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads, **sizes, **rest
    )


FLAVORS: dict[str, OlmoeConfig] = {
    "tiny": _olmoe(64, 4, 4, 48, 8, 3, vocab_size=2048),  # titan's own
    "1B-7B": _olmoe(2048, 16, 16, 1024, 64, 8),
}
