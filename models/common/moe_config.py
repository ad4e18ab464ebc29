"""Sizes of a mixture of experts, as fields that families add to Llama's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """Sizes of Llama, and of the experts that replace the feed-forward layer.

    A coefficient of 0 turns its term off.

    Attributes:
        num_experts: Routed experts. 0: the model is dense.
        top_k: Experts that each token goes to.
        expert_dim: Width of an expert.
        num_shared_experts: Experts that all tokens go to, built as one SwiGLU of this many times `expert_dim`.
        n_dense_layers: First blocks, which keep their feed-forward layer.
        score: "softmax" or "sigmoid" of the router's logits.
        normalize_weights: Whether a token's weights are divided by their sum.
        route_scale: Factor of the weights after that.
        num_groups: Groups of experts. 0: no groups.
        top_groups: Best groups, to which a token's choice is restricted.
        group_top_k: Best experts of a group, whose scores add up to the group's score.
        moe_biases: Whether the router and the experts have biases.
        swiglu_limit: Limit of gpt-oss's clamped SwiGLU. 0: plain SwiGLU.
        load_balance_coeff: Step of the routing bias (arXiv:2408.15664).
        sequence_balance_coeff: Weight of the balance loss of each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17).
        global_balance_coeff: Weight of the balance loss of the global batch (arXiv:2501.11873).
        router_z_loss_coeff: Weight of the router's z-loss (ST-MoE, arXiv:2202.08906).
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
    def num_attention_params(self) -> int:
        """Return the number of parameters in the matmuls of a block's attention."""
        return 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_dim

    @property
    def num_expert_params(self) -> int:
        """Return the number of parameters of one expert, without biases."""
        return 3 * self.dim * self.expert_dim

    def num_bias_params(self, experts: int) -> int:
        """Return the number of biases of the router and of this many experts."""
        return self.moe_biases * (self.num_experts + experts * (2 * self.expert_dim + self.dim))

    def block_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters of a block.

        Args:
            layer: Number of the block.
            active: Count only the parameters that act on one token.
        """
        common = self.num_attention_params + self.num_block_norm_params
        if not self.is_moe_layer(layer):
            return common + 3 * self.dim * self.ffn_dim
        routed = self.top_k if active else self.num_experts
        common += self.dim * self.num_experts + self.num_bias_params(routed)
        return common + (self.num_shared_experts + routed) * self.num_expert_params

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of the last block, the largest."""
        return self.block_params(self.n_layers - 1)

    @property
    def num_params(self) -> int:
        """Return the number of parameters of the model, all experts included."""
        return self._count(active=False)

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that act on one token, among them its K routed experts and both embeddings."""
        return self._count(active=True)

    def _count(self, *, active: bool) -> int:
        embeddings = self.num_embedding_params * (1 if self.tied_embeddings else 2)
        blocks = sum(
            self.block_params(layer, active=active) for layer in range(self.num_blocks)
        )
        return embeddings + blocks + self.num_mtp_params + self.dim

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one token, of active parameters only.

        Args:
            seq_len: Tokens of a sequence.
            causal: Count only the pairs of queries and keys that a causal mask leaves.
        """
        blocks = (
            self.block_params(layer, active=True)
            - self.num_block_norm_params
            - self.is_moe_layer(layer) * self.num_bias_params(self.top_k)
            for layer in range(self.num_blocks)
        )
        matmul_params = sum(blocks) + self._matmul_params_after_blocks
        return 6 * matmul_params + self.attention_flops_per_token(seq_len, causal=causal)
