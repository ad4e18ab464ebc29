"""Llama 3 as a plain nn.Module: grouped-query attention, rotary positions, RMSNorm, SwiGLU (arXiv:2407.21783).

The file knows nothing of parallelism: titan/parallel/ works on it from outside. Three things make that easy:
blocks are in a ModuleDict under their global number, so a pipeline stage that holds some of them keeps their
names; embedding, norm and output layer may be absent (set to None) on a stage; and everything that is allocated
at construction is described by `init_std`, so the module can be built on meta.

B batch, S sequence, D model, H query heads, G key/value heads, K head dim, V vocabulary
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention, Sinks
from titan.models.common.config import LlamaConfig
from titan.models.common.moe import MoE
from titan.models.common.moe_config import MoEConfig
from titan.models.common.rotary import rope_frequencies, rotate, rotation_table
from titan.parallel.traits import BlockTraits


class Attention(nn.Module):
    """Grouped-query attention: projections and rotation around the inner attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        self.inner_attention = InnerAttention()
        self.sinks: Sinks | None = None  # a family may have some

    def forward(
        self, x_BSD: Tensor, cos_sin: tuple[Tensor, Tensor], document_ids_BS: Tensor | None
    ) -> Tensor:
        """Compute attention.

        Args:
            x_BSD: normalized residual stream.
            cos_sin: `rotation_table` of the positions, (S, 1, K) or (B, S, 1, K) each.
            document_ids_BS: numbers of the packed documents. None: one document in each sequence.

        Returns:
            The layer's output, (B, S, D).
        """
        q_BSHK, k_BSGK, v_BSGK = self.heads(x_BSD)
        rotated = rotate(q_BSHK, cos_sin), rotate(k_BSGK, cos_sin), v_BSGK
        # Heads are transposed last, and only as views: attention kernels read any strides.
        q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in rotated)
        sinks = () if self.sinks is None else (self.sinks(),)
        o_BHSK = self.inner_attention(q_BHSK, k_BGSK, v_BGSK, document_ids_BS, *sinks)
        return self.wo(o_BHSK.transpose(1, 2).flatten(-2))

    def heads(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, S, H, K), keys and values (B, S, G, K)."""
        # -1 for the number of heads: under tensor parallelism each rank holds some of them.
        q, k, v = (
            w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        return q, k, v


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layer, (B, S, D) to (B, S, D)."""
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    """Decoder block: attention, then feed-forward or experts, each with a norm before it and added to the residual stream."""

    def __init__(
        self, config: LlamaConfig, layer: int, *, attention: type[nn.Module] = Attention
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention(config)
        inner: Any = self.attention.inner_attention
        inner.window = config.window_of(layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = build_moe(config, layer)
        if self.moe is None:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(
        self, x_BSD: Tensor, cos_sin: tuple[Tensor, Tensor], document_ids_BS: Tensor | None
    ) -> Tensor:
        """Run the block.

        Args:
            x_BSD: residual stream.
            cos_sin: as for `Attention`.
            document_ids_BS: as for `Attention`.

        Returns:
            The residual stream after the block, (B, S, D).
        """
        if self.moe is None:
            # Not through `attend`: its result would keep the normalized input alive for longer than needed.
            h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_sin, document_ids_BS)
            return h_BSD + self.feed_forward(self.ffn_norm(h_BSD))
        h_BSD, x_BSD = self.attend(x_BSD, cos_sin, document_ids_BS)
        return h_BSD + self.moe(x_BSD)

    def attend(
        self, x_BSD: Tensor, cos_sin: tuple[Tensor, Tensor], document_ids_BS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and its normalized copy."""
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_sin, document_ids_BS)
        return h_BSD, self.ffn_norm(h_BSD)

    @property
    def traits(self) -> BlockTraits:
        """Return the functions to compile: the whole block, or without experts, since these wait for the device."""
        return BlockTraits() if self.moe is None else self.moe.traits.within("moe", "attend")


def build_moe(config: LlamaConfig, layer: int) -> MoE | None:
    """Return the experts of a block. None: the block has a feed-forward layer."""
    if not isinstance(config, MoEConfig) or not config.is_moe_layer(layer):
        return None
    width = config.num_shared_experts * config.expert_dim
    return MoE(config, shared_experts=FeedForward(config.dim, width) if width else None)


class MTPModule(nn.Module):
    """Module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, eq. 21-23).

    Each module predicts one token further ahead than the module before it.
    """

    def __init__(self, config: LlamaConfig, block: Any) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.head_norm = (
            nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = block

    def forward(
        self,
        x_BSD: Tensor,
        token_BSD: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        document_ids_BS: Tensor | None,
    ) -> Tensor:
        """Run the module.

        Args:
            x_BSD: hidden states of the previous module, or of the model itself, as the output layer reads them.
            token_BSD: embeddings of the tokens that the previous module predicts.
            cos_sin: as for `Attention`.
            document_ids_BS: as for `Attention`.

        Returns:
            Hidden states for the output layer, (B, S, D).
        """
        # In the order of the released weights; the paper has the hidden state first.
        both = torch.cat([self.enorm(token_BSD), self.hnorm(x_BSD)], dim=-1)
        return self.head_norm(self.block(self.eh_proj(both), cos_sin, document_ids_BS))

    @property
    def traits(self) -> BlockTraits:
        """Return the functions to compile, as `Block` does."""
        return self.block.traits.within("block")


class Llama(nn.Module):
    """Decoder of Llama, from token ids to logits."""

    rotations: Tensor | None

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: type[nn.Module] = Attention,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): block(config, i, attention=attention) for i in range(config.num_blocks)}
        )
        for name in map(str, range(config.n_layers, config.num_blocks)):
            self.layers[name] = MTPModule(config, self.layers[name])
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        # One parameter, under both names.
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rotations", None, persistent=False)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        mtp_targets_BSM: Tensor | None = None,
    ) -> Tensor:
        """Compute logits.

        Args:
            tokens_BS: ids, int64, or on a later pipeline stage the previous stage's activations, (B, S, D).
            positions_BS: positions for the rotation, int64: (B, S) below the reserved length, or (S,) of any size.
                None: 0 .. S-1.
            document_ids_BS: see InnerAttention, int64. None: one document.
            mtp_targets_BSM: the tokens 1, 2, ... after each, int64, for the M modules of multi-token prediction. None: the modules
                do not run.

        Returns:
            Logits, (B, S, V), in the dtype of the weights. With `mtp_targets_BSM` the modules' logits follow, (B + M x B, S, V).
        """
        cos_sin = self.rotary_cos_sin(positions_BS, tokens_BS.shape[1], tokens_BS.device)
        mtp = () if mtp_targets_BSM is None else mtp_targets_BSM.unbind(-1)
        x_BSD = tokens_BS
        if self.tok_embeddings is not None:
            x_BSD = self.embed(torch.cat([tokens_BS, *mtp]) if mtp else tokens_BS)
        return self.decode(x_BSD, cos_sin, document_ids_BS, num_mtp_modules=len(mtp))

    def decode(
        self,
        x_BSD: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        document_ids_BS: Tensor | None,
        *,
        num_mtp_modules: int = 0,
    ) -> Tensor:
        """Return the logits of embedded tokens.

        The embeddings for multi-token prediction follow in the batch and skip the blocks. So a pipeline needs the embedding on its
        first stage only, and its gradient comes back there.

        Args:
            x_BSD: embeddings of (1 + num_mtp_modules) batches.
            cos_sin: rotations of the positions, for all blocks.
            document_ids_BS: as for `forward`.
            num_mtp_modules: number of batches for multi-token prediction.
        """
        x_BSD, *mtp = x_BSD.chunk(1 + num_mtp_modules) if num_mtp_modules else [x_BSD]
        num_layers = self.config.n_layers
        for number, block in self.layers.items():
            if int(number) < num_layers:
                x_BSD = block(x_BSD, cos_sin, document_ids_BS)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        before_BSD = x_BSD
        for n, token_BSD in enumerate(mtp):
            if (name := str(num_layers + n)) in self.layers:  # else on a later pipeline stage
                before_BSD = self.layers[name](before_BSD, token_BSD, cos_sin, document_ids_BS)
                mtp[n] = before_BSD
        if mtp:
            x_BSD = torch.cat([x_BSD, *mtp])
        return x_BSD if self.output is None else self.output(x_BSD)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the embeddings of tokens, (B, S, D). Not called on a stage without them."""
        assert self.tok_embeddings is not None
        return self.tok_embeddings(tokens_BS)

    def reserve_positions(self, length: int) -> None:
        """Store the rotations of positions below `length`, so that forward passes compute none. Works on meta, too."""
        width = 4 * len(self.frequencies(torch.device("meta")))
        self.rotations = torch.empty(length, width, dtype=torch.float32)
        if not self.rotations.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the table of rotations, if there is one."""
        if self.rotations is not None:
            positions = torch.arange(len(self.rotations), device=self.rotations.device)
            self.rotations.copy_(rotation_table(positions, self.frequencies(positions.device)))

    def rotary_cos_sin(
        self, positions: Tensor | None, length: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin for all blocks, (S, 1, K) or (B, S, 1, K), from the table if it has the positions."""
        table = self.rotations
        if positions is None and table is not None and length <= len(table):
            rows = table[:length]
        elif positions is not None and positions.ndim == 2 and table is not None:
            rows = F.embedding(positions, table)
        else:
            positions = torch.arange(length, device=device) if positions is None else positions
            rows = rotation_table(positions, self.frequencies(device))
        # A dimension for the heads, over which angles are the same.
        cos, sin = rows[..., None, :].chunk(2, dim=-1)
        return cos, sin

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation per position of each pair of channels, fp32, in radians."""
        config = self.config
        return rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, device)

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial truncated normal of a parameter. None: all ones (norms).

        Projections into the residual stream shrink with the depth of their block, the output layer with
        the width, so that initial logits are of order one at any size (as TorchTitan and lingua do).
        """
        config = self.config
        if "norm" in name:
            return None
        if name.startswith("output.") or (
            config.tied_embeddings and name.startswith("tok_embeddings.")
        ):
            return config.dim**-0.5
        if name.startswith("tok_embeddings."):
            return 1.0
        if name.endswith((".wo.weight", ".w2.weight", ".experts.w2")):
            layer = int(name.split(".")[1])
            return config.init_std / math.sqrt(2 * (layer + 1))
        return config.init_std
