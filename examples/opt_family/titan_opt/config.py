"""Sizes of OPT, and the counts that titan reads of them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OPTConfig:
    """One size of the family. max_positions: the longest sequence, since positions are learned."""

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int = 50272
    max_positions: int = 2048
    tied_embeddings: bool = True

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim

    @property
    def num_block_params(self) -> int:
        return 12 * self.dim**2 + 13 * self.dim  # matrices; biases and two norms

    @property
    def num_embedding_params(self) -> int:
        return self.vocab_size * self.dim

    @property
    def num_params(self) -> int:
        embeddings = self.num_embedding_params * (1 if self.tied_embeddings else 2)
        positions = (self.max_positions + 2) * self.dim
        return embeddings + positions + self.n_layers * self.num_block_params + 2 * self.dim

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Count 6 for each parameter of a matrix product, and attention (arXiv:2204.02311, appendix B)."""
        products = 12 * self.n_layers * self.dim**2 + self.num_embedding_params
        attention = 12 * self.n_layers * self.dim * seq_len
        return 6 * products + (attention // 2 if causal else attention)


FLAVORS = {
    "tiny": OPTConfig(dim=64, n_layers=4, n_heads=4, vocab_size=2048, max_positions=256),
    "125M": OPTConfig(dim=768, n_layers=12, n_heads=12),
    "1.3B": OPTConfig(dim=2048, n_layers=24, n_heads=32),
    "6.7B": OPTConfig(dim=4096, n_layers=32, n_heads=32),
    "66B": OPTConfig(dim=9216, n_layers=64, n_heads=72),
}
