"""Sizes of a mixture of experts, as fields that families add to Llama's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """Sizes of Llama, and of the experts that replace the feed-forward layer.

    A coefficient of 0 turns its term off.

    Attributes:
        num_experts: routed experts. 0: the model is dense.
        top_k: experts that each token goes to.
        expert_dim: width of an expert.
        num_shared_experts: experts that all tokens go to, built as one SwiGLU of this many times `expert_dim`.
        n_dense_layers: first blocks, which keep their feed-forward layer.
        score: "softmax" or "sigmoid" of the router's logits.
        normalize_weights: whether a token's weights are divided by their sum.
        route_scale: factor of the weights after that.
        num_groups: groups of experts. 0: no groups.
        top_groups: best groups, to which a token's choice is restricted.
        group_top_k: best experts of a group, whose scores add up to the group's score.
        moe_biases: whether the router and the experts have biases.
        swiglu_limit: limit of gpt-oss's clamped SwiGLU. 0: plain SwiGLU.
        load_balance_coeff: step of the routing bias (arXiv:2408.15664).
        sequence_balance_coeff: weight of the balance loss of each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17).
        global_balance_coeff: weight of the balance loss of the global batch (arXiv:2501.11873).
        router_z_loss_coeff: weight of the router's z-loss (ST-MoE, arXiv:2202.08906).
    """

    num_experts: int = 0
    top_k: int = 0
    expert_dim: int = 0
    num_shared_experts: int = 0
    n_dense_layers: int = 0
    score: str = "softmax"
    normalize_weights: bool = False
    route_scale: float = 1.0
    num_groups: int = 0
    top_groups: int = 0
    group_top_k: int = 2
    moe_biases: bool = False
    swiglu_limit: float = 0.0
    load_balance_coeff: float = 0.0
    sequence_balance_coeff: float = 0.0
    global_balance_coeff: float = 0.0
    router_z_loss_coeff: float = 0.0

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return self.num_experts > 0 and layer >= self.n_dense_layers

    @property
    def num_expert_params(self) -> int:
        """Return the number of parameters of one expert, without biases."""
        return 3 * self.dim * self.expert_dim

    def block_matmul_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters in the matmuls of a block, as `LlamaConfig` counts them."""
        if not self.is_moe_layer(layer):
            return self.num_dense_params
        experts = self.num_shared_experts + (self.top_k if active else self.num_experts)
        router = self.dim * self.num_experts
        return self.num_attention_params + router + experts * self.num_expert_params

    def block_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters of a block, as `LlamaConfig` counts them."""
        routed = self.top_k if active else self.num_experts
        biases = self.num_experts + routed * (2 * self.expert_dim + self.dim)
        biases *= self.moe_biases and self.is_moe_layer(layer)
        return super().block_params(layer, active=active) + biases

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of the last block, the largest."""
        return self.block_params(self.n_layers - 1)

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that act on one token, among them its K routed experts and both embeddings."""
        return self._count(active=True)
