"""Sizes of a decoder like Llama, which families add fields to. Imports no torch.

Parameter and FLOP counts follow from the sizes alone, so that `titan check` prints them without building a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from titan.parallel.traits import ModelSizes

_Sizes = TypeVar("_Sizes", bound=ModelSizes)


def flavors_by(columns: str, kind: type[_Sizes], **shared: Any) -> Callable[..., _Sizes]:
    """Return a function that makes a flavor of the values of these fields in order, and of more fields by name."""
    names = columns.split()
    return lambda *values, **rest: kind(**shared | dict(zip(names, values, strict=True)) | rest)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling that stretches Llama 3.1's context (see `rope_frequencies` in rotary.py)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelSizes):
    """Sizes of a decoder like Llama.

    Attributes:
        dim: model width.
        n_layers: number of blocks, without the modules of multi-token prediction.
        n_heads: query heads.
        n_kv_heads: key/value heads, each shared by n_heads / n_kv_heads query heads.
        ffn_dim: width of the SwiGLU.
        vocab_size: rows of the embedding.
        head_dim: channels of a head. 0: dim / n_heads.
        norm_eps: epsilon of the RMSNorms.
        rope_theta: base of the rotary frequencies.
        rope_factor: factor of `RopeScaling`. 0: no scaling.
        tied_embeddings: whether the output layer is the embedding.
        init_std: standard deviation of initial weights.
        num_mtp_modules: modules of multi-token prediction after the last block, which each predict one token further
            ahead (DeepSeek-V3, arXiv:2412.19437, section 2.2).
        mtp_coeff: weight of the mean of their losses.
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
        """Return the scaling that `rope_factor` stands for, or None if it is 0."""
        return RopeScaling(factor=self.rope_factor) if self.rope_factor else None

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, those of multi-token prediction included."""
        return self.n_layers + self.num_mtp_modules

    @property
    def last_modules(self) -> tuple[str, ...]:
        """Return the names of the modules that a pipeline puts on its last stage, after the blocks."""
        return (
            *(f"layers.{n}" for n in range(self.n_layers, self.num_blocks)),
            "norm",
            "output",
        )

    @property
    def num_mtp_params(self) -> int:
        """Return the number of parameters of multi-token prediction outside its blocks: a projection and three norms each."""
        return self.num_mtp_modules * (2 * self.dim + 3) * self.dim

    @property
    def num_block_norm_params(self) -> int:
        """Return the number of parameters of a block's norms."""
        return 2 * self.dim

    @property
    def num_attention_params(self) -> int:
        """Return the number of parameters in the matmuls of a block's attention."""
        return 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_dim

    @property
    def num_dense_params(self) -> int:
        """Return the number of parameters in the matmuls of a block without experts."""
        return self.num_attention_params + 3 * self.dim * self.ffn_dim

    def block_matmul_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters in the matmuls of a block. A family may state `num_block_params` in its place.

        Args:
            layer: number of the block.
            active: count only the parameters that act on one token.
        """
        return self.num_block_params - self.num_block_norm_params

    def block_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters of a block, norms included. The arguments are those of `block_matmul_params`."""
        return self.block_matmul_params(layer, active=active) + self.num_block_norm_params

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of a block, norms included."""
        return self.num_dense_params + self.num_block_norm_params

    @property
    def num_embedding_params(self) -> int:
        """Return the number of parameters of the embedding. An output layer has as many."""
        return self.vocab_size * self.dim

    @property
    def num_params(self) -> int:
        """Return the number of parameters. Tied embeddings count once."""
        return self._count(active=False)

    def _count(self, *, active: bool) -> int:
        embeddings = self.num_embedding_params * (1 if self.tied_embeddings else 2)
        layers = range(self.num_blocks)
        blocks = sum(self.block_params(layer, active=active) for layer in layers)
        # The last norm counts once.
        return embeddings + blocks + self.num_mtp_params + self.dim

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one token.

        Each parameter of a matmul costs 6 operations, if it acts on the token. The output layer counts as a matmul; the embedding look-up and norms
        do not. Attention costs 12 x layers x heads x head_dim x seq_len (PaLM, arXiv:2204.02311, appendix B), or less where a
        layer's window is shorter than the sequence.

        Args:
            seq_len: tokens of a sequence.
            causal: count only the pairs of queries and keys that a causal mask leaves. Without a window these are half.
        """
        layers = range(self.num_blocks)
        blocks = sum(self.block_matmul_params(layer, active=True) for layer in layers)
        # Norms are no matmuls, and an embedding is looked up. The output layer is a matmul, also if it is tied, and it runs
        # once more for each module of multi-token prediction.
        outputs = (1 + self.num_mtp_modules) * self.num_embedding_params
        matmul_params = blocks + outputs + self.num_mtp_modules * 2 * self.dim**2
        return 6 * matmul_params + self.attention_flops_per_token(seq_len, causal=causal)

    def attention_flops_per_token(self, seq_len: int, *, causal: bool) -> int:
        """Return the floating-point operations of attention itself for one token.

        Args:
            seq_len: tokens of a sequence.
            causal: count only the pairs of queries and keys that a causal mask leaves.
        """
        flops = 0
        for layer in range(self.num_blocks):
            keys = min(self.window_of(layer) or seq_len, seq_len)
            # The first queries see fewer keys than the window has: keys^2 / 2 pairs less in a sequence.
            pairs = 2 * seq_len * keys - (keys * keys if causal else 0)
            flops += 6 * self.attention_width(layer) * pairs // seq_len
        return flops

    def attention_width(self, layer: int) -> int:
        """Return the number of channels of the queries of a layer."""
        return self.n_heads * self.head_dim
