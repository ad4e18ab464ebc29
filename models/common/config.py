"""Sizes of a decoder like Llama, which families add fields to. Imports no torch.

Counts follow from the sizes alone, so that `titan check` can say them without building anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Describe the frequency scaling that stretches Llama 3.1's context (see `rope_frequencies` in rotary.py)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a decoder like Llama.

    dim: model width; n_layers: blocks; n_heads, n_kv_heads: query heads and shared key/value heads;
    ffn_dim: width of the SwiGLU; vocab_size: rows of the embedding; tied_embeddings: the output layer is
    the embedding; rope_factor: 0 for no scaling, else the factor of `RopeScaling`.

    num_mtp_modules: blocks after the last one that learn to predict further tokens, one each (multi-token prediction, DeepSeek-V3,
    arXiv:2412.19437, section 2.2); mtp_coeff: weight of the mean of their losses.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_factor: float = 0.0
    tied_embeddings: bool = False
    init_std: float = 0.02
    num_mtp_modules: int = 0
    mtp_coeff: float = 0.3

    def __post_init__(self) -> None:
        # Frozen dataclasses set fields in __post_init__ through object.
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Return the scaling that `rope_factor` stands for, if it is not 0."""
        return RopeScaling(factor=self.rope_factor) if self.rope_factor else None

    @property
    def num_blocks(self) -> int:
        """Return the blocks, those of multi-token prediction included."""
        return self.n_layers + self.num_mtp_modules

    @property
    def last_modules(self) -> tuple[str, ...]:
        """Return what a pipeline puts on its last stage, after the blocks."""
        return (*(f"layers.{n}" for n in range(self.n_layers, self.num_blocks)), "norm", "output")

    @property
    def num_mtp_params(self) -> int:
        """Return the parameters of multi-token prediction outside its blocks: a projection and three norms each."""
        return self.num_mtp_modules * (2 * self.dim + 3) * self.dim

    @property
    def num_block_norm_params(self) -> int:
        """Return the parameters of a block's norms."""
        return 2 * self.dim

    @property
    def num_block_params(self) -> int:
        """Return the parameters of a block, norms included."""
        # wq, wo, then wk and wv, then the three matrices of the SwiGLU.
        q_and_o = 2 * self.dim * self.n_heads * self.head_dim
        k_and_v = 2 * self.dim * self.n_kv_heads * self.head_dim
        return q_and_o + k_and_v + 3 * self.dim * self.ffn_dim + self.num_block_norm_params

    @property
    def num_embedding_params(self) -> int:
        """Return the parameters of the embedding, which are also those of an output layer."""
        return self.vocab_size * self.dim

    @property
    def num_params(self) -> int:
        """Return all parameters. Tied embeddings count once."""
        embeddings = self.num_embedding_params * (1 if self.tied_embeddings else 2)
        # The last norm counts once.
        blocks = self.num_blocks * self.num_block_params + self.num_mtp_params
        return embeddings + blocks + self.dim

    def window_of(self, layer: int) -> int:
        """Return how many keys a query of a layer sees, itself included; 0: all before it."""
        return 0

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one token of a sequence of `seq_len`.

        6 for every matrix-product parameter (the output layer counted, the embedding look-up and norms
        not) plus 12 x layers x heads x head_dim x seq_len for attention (PaLM, arXiv:2204.02311, appendix B), where a
        layer's window may be shorter; `causal` counts only what a causal mask leaves, without a window half of it.
        """
        matmul_params = self.num_blocks * (self.num_block_params - self.num_block_norm_params)
        matmul_params += self._matmul_params_after_blocks
        return 6 * matmul_params + self.attention_flops_per_token(seq_len, causal=causal)

    @property
    def _matmul_params_after_blocks(self) -> int:
        # Norms are no matrix products, and an embedding is looked up. The output layer multiplies, also if it is tied, and once
        # more for each further token.
        outputs = (1 + self.num_mtp_modules) * self.num_embedding_params
        return outputs + self.num_mtp_modules * 2 * self.dim**2

    def attention_flops_per_token(self, seq_len: int, *, causal: bool) -> int:
        """Return those of attention itself."""
        flops = 0
        for layer in range(self.num_blocks):
            keys = min(self.window_of(layer) or seq_len, seq_len)
            # The first queries see fewer keys than the window has: keys^2 / 2 pairs less in a sequence.
            pairs = 2 * seq_len * keys - (keys * keys if causal else 0)
            flops += 6 * self.n_heads * self.head_dim * pairs // seq_len
        return flops
