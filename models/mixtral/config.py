"""Sizes of Mixtral (arXiv:2401.04088 and the models' config.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.moe_config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig):
    """Sizes of Mixtral: the fields of MoEConfig. Values that all its models share are defaults."""

    n_kv_heads: int = 8
    vocab_size: int = 32000
    rope_theta: float = 1_000_000.0
    num_experts: int = 8
    top_k: int = 2
    normalize_weights: bool = True
    global_balance_coeff: float = 0.02  # router_aux_loss_coef of the 8x7B


FLAVORS: dict[str, MixtralConfig] = {
    # titan's own
    "tiny": MixtralConfig(
        dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=96, expert_dim=96, vocab_size=2048
    ),
    "8x7B": MixtralConfig(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336, expert_dim=14336),
    "8x22B": MixtralConfig(dim=6144, n_layers=56, n_heads=48, ffn_dim=16384, expert_dim=16384),
}
