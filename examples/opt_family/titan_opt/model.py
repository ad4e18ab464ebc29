"""OPT as a plain nn.Module: learned positions, LayerNorm, biases, ReLU. B batch, S sequence, D model, H heads, K head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention

from .config import OPTConfig


class Embeddings(nn.Module):
    """Tokens and positions, as one module: a pipeline stage has both or none."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_positions + 2, config.dim)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        return self.tokens(tokens_BS) + self.positions(
            positions_BS + 2
        )  # OPT's first rows are unused


class Attention(nn.Module):
    """Projections around the inner attention, where masks and context parallelism act."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(config.dim, config.dim) for _ in range(4)
        )
        self.inner_attention = InnerAttention()

    def forward(self, x_BSD: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        # -1 for the number of heads: a tensor-parallel rank has some of them.
        q_BHSK, k_BHSK, v_BHSK = (
            w(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        o_BHSK = self.inner_attention(q_BHSK, k_BHSK, v_BHSK, document_ids_BS)
        return self.wo(o_BHSK.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.ffn_dim)
        self.down = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BSD)))


class Block(nn.Module):
    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x_BSD: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), document_ids_BS)
        return h_BSD + self.feed_forward(self.ffn_norm(h_BSD))


class OPT(nn.Module):
    """Token ids to logits; embeddings, norm and output are None on the pipeline stages without them."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = Embeddings(config)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(config.dim)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
    ) -> Tensor:
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        x_BSD = tokens_BS  # a later stage's input are the activations of the stage before
        if self.tok_embeddings is not None:
            x_BSD = self.tok_embeddings(tokens_BS, positions_BS)
        for block in self.layers.values():
            x_BSD = block(x_BSD, document_ids_BS)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return x_BSD if self.output is None else self.output(x_BSD)

    def init_std(self, name: str) -> float | None:
        """Return the deviation of a parameter's initial values; 0.0: zeros, None: ones."""
        return 0.0 if name.endswith("bias") else None if "norm" in name else 0.02
