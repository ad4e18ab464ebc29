"""titan's sparse attention in the place of transformers', for layers with an indexer (DeepSeek Sparse Attention and its relatives).

A small indexer scores every key for each query, and attention sees the best few (DeepSeek-V3.2, arXiv:2512.02556):

    tokens   I[t, s] = sum_h w[t, h] relu(qI[t, h] . kI[s] / sqrt(D)), the best `keys` tokens (DeepSeek-V3.2, GLM-5)
    blocks   I[g, t, s] = qI[t, g] . kI[s] / sqrt(D) for each key/value head g, the best `keys` blocks by their largest score, where the last few
             blocks of the query are always among them (MiniMax M3)

Equal scores are common, since relu gives zeros: of these, the earliest keys are chosen. A layer may read the choice of the layer before
(GLM-5.2). Scores, masks and attention are computed for `_ROWS` queries at a time, forward and backward, so that memory grows with S
and not with S^2. A recomputation of activations takes the choice of the forward pass.

An example with `keys` = 2 and scores [0, 3, 0, 1] of the query at position 3: it sees the keys 1 and 3. With scores [0, 3, 0, 0] it sees 0
and 1. Of two documents of 2 tokens each it sees 2 and 3.

`SparseAttention` is a child of the attention module. The indexer's forward pass becomes titan's, which gets the same arguments, and
its inputs are detached: it learns by its own loss alone (indexer_loss.py). Under context parallelism each rank gathers the keys
of the indexer, and those of attention, of latent attention as latents.

B batch, S queries of this rank, T positions, H heads, G choices of a query: 1, or key/value heads; I heads of the indexer, D its head dim,
K head dim, N chosen tokens or blocks, R queries at a time
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.parallel.block_attention import match_heads
from titan.parallel.collectives import all_gather
from titan.parallel.context import shard_sequence, unshard_sequence
from titan.parallel.documents import DocumentMask
from titan.parallel.module_kinds import RouteSource, SequenceModule, modules_of
from titan.parallel.ring import SequencePart
from titan.parallel.selective import outside_selection
from titan.parallel.traits import BlockTraits

from .errors import UnsupportedModelError
from .indexer_loss import IndexerLoss

_ROWS = 128  # queries at a time


class NoMask:
    """Substitute for the mask that transformers does not make for titan: code of a layer may index it."""

    def __getitem__(self, _: Any) -> NoMask:
        return self


NO_MASK = NoMask()


@dataclass(frozen=True)
class Visible:
    """Keys that the queries of a rank may see: those of their document, up to their own position.

    Attributes:
        first_BT: first position of the document of each position, int64. B may be 1.
        positions_S: positions of the queries.
        first_BS: first position of each query's document.
        blocks_BT: number of the block of each position. A document begins a block. None: blocks of one token.
    """

    first_BT: Tensor
    positions_S: Tensor
    first_BS: Tensor
    blocks_BT: Tensor | None

    def chunks(self) -> Iterator[slice]:
        """Yield slices of queries that are computed at a time."""
        for start in range(0, len(self.positions_S), _ROWS):
            yield slice(start, start + _ROWS)

    def mask(self, rows: slice) -> Tensor:
        """Return whether queries see each key, (B, 1, R, T)."""
        keys_T = torch.arange(self.first_BT.shape[1], device=self.first_BT.device)
        is_before_RT = keys_T <= self.positions_S[rows, None]
        return ((keys_T >= self.first_BS[:, rows, None]) & is_before_RT)[:, None]

    def chosen(self, chosen_BGRN: Tensor, rows: slice) -> Tensor:
        """Return whether queries see each key by their choice, (B, G, R, T)."""
        shape = *chosen_BGRN.shape[:3], self.first_BT.shape[1]
        is_in = torch.zeros(shape, dtype=torch.bool, device=chosen_BGRN.device)
        is_in = is_in.scatter(-1, chosen_BGRN.long(), True)
        if self.blocks_BT is not None:
            is_in = is_in.gather(-1, self.blocks_BT[:, None, None].expand(shape))
        return is_in & self.mask(rows)


class SparseAttention(SequenceModule):
    """Choice of keys of one layer, and attention over it.

    Attributes:
        keys: tokens or blocks that a query sees.
        block: tokens of a block.
        local: last blocks of a query that it always sees.
        width: channels of the indexer's queries, 0 for a layer without one.
        scale: factor of the indexer's dot products in its scores.
        stage: "joint": the layer is sparse. "dense", "indexer": it sees all keys.
        loss_coeff: factor of the indexer's loss.
        num_tokens: tokens of the global batch, which the step sets.
        heads: query heads of all ranks.
        sums: of this rank's queries: the indexer's loss, the mass of dense attention in the choice, and their number, (3,).
        part: this rank's part of the sequence. None: all of it.
        tp: mesh of the tensor-parallel ranks, None for one.
    """

    part: SequencePart | None = None
    stage = "joint"
    loss_coeff = 0.0
    num_tokens: float = 1
    heads = 0
    tp: Any = None
    sums: Any = 0.0
    documents: Any = None  # of the layer's call that runs
    scored: tuple[Any, ...] | None = None  # what the indexer computed in it

    def __init__(
        self,
        *,
        keys: int,
        width: int = 0,
        block: int = 1,
        local: int = 0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.keys, self.width, self.scale = keys, width, scale
        self.block, self.local = block, local
        self.route_sources: list[RouteSource] = []  # which keep the choice for a recomputation

    def begin(self, stage: str) -> None:
        """Begin a step of a stage: its sums are those of no query."""
        self.stage, self.sums = stage, 0.0

    def hold(self, part: SequencePart) -> None:
        """Compute with the part of the sequence that this rank holds."""
        self.part = part

    def starts(self, document_ids_BS: Tensor) -> Tensor:
        """Return the first position of the document of each position of the whole sequence, (B, T)."""
        ids_BT = self.whole(document_ids_BS, 1)
        places_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        is_same_BT = F.pad(ids_BT[:, 1:] == ids_BT[:, :-1], (1, 0))
        return places_BT.masked_fill(is_same_BT, 0).cummax(1).values

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return a tensor of the whole sequence from those of all ranks. Differentiable."""
        part = self.part
        if part is None:
            return x
        parts = all_gather(x, group=part.group, size=part.size)
        joined = torch.cat(parts.unbind(), dim)
        return unshard_sequence(joined, dim=dim, size=part.size, balanced=part.balanced)

    def visible(self, length: int, device: torch.device) -> Visible:
        """Return the keys that queries may see in the call that runs."""
        part, documents = self.part, self.documents
        length *= 1 if part is None else part.size
        places_T = torch.arange(length, device=device)
        if isinstance(documents, DocumentMask):
            first_BT = documents.starts_BS  # share_document_mask asked `starts`
            assert first_BT is not None
        elif documents is None:
            first_BT = torch.zeros_like(places_T)[None]
        else:
            first_BT = self.starts(documents)
        blocks_BT = None
        if self.block > 1:
            blocks_BT = ((places_T - first_BT) % self.block == 0).cumsum(1) - 1
        positions_S, first_BS = places_T, first_BT
        if part is not None:
            rank, size, balanced = part.rank, part.size, part.balanced
            positions_S, first_BS = (
                shard_sequence(x, dim=-1, rank=rank, size=size, balanced=balanced)
                for x in (places_T, first_BT)
            )
        return Visible(first_BT, positions_S, first_BS, blocks_BT)

    def score(self, q_BRID: Tensor, k_BTD: Tensor, w_BRI: Tensor | None) -> Tensor:
        """Return the indexer's scores of all keys, (B, G, R, T), in fp32."""
        # One product for all queries: a batch of them would copy the keys for each.
        dots = q_BRID.float().flatten(1, 2) @ k_BTD.float().mT
        dots_BRIT = dots.unflatten(1, q_BRID.shape[1:3]) * self.scale
        if w_BRI is not None:
            dots_BRIT = w_BRI[:, :, None] @ F.relu(dots_BRIT)
        return dots_BRIT.transpose(1, 2)

    @torch.no_grad()
    def choose(self, *scored: Any) -> Tensor:
        """Return the best tokens or blocks of each query, (B, G, S, N) int32. Of equal ones, the earliest.

        Args:
            scored: arguments of `_candidates`.
        """
        found = []
        for _, scores_BGRT in self._candidates(*scored):
            order = scores_BGRT.sort(dim=-1, descending=True, stable=True).indices
            found.append(order[..., : self.keys].int())
        return torch.cat(found, dim=2)

    def _candidates(
        self, q_BSID: Tensor, k_BTD: Tensor, w_BSI: Tensor | None, visible: Visible
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield some queries at a time with their scores of tokens or blocks, (B, G, R, T), infinity below 0 for those not seen."""
        for rows in visible.chunks():
            weights = None if w_BSI is None else w_BSI[:, rows]
            scores_BGRT = self.score(q_BSID[:, rows], k_BTD, weights)
            # Adding 0 makes the zeros of negative weights, -0, equal to the others.
            scores_BGRT = scores_BGRT.masked_fill(~visible.mask(rows), -torch.inf) + 0.0
            if visible.blocks_BT is not None:
                scores_BGRT = self._pool(scores_BGRT, visible, rows)
            yield rows, scores_BGRT

    @torch.no_grad()
    def record_choice(self, chosen_BGSN: Tensor) -> dict[str, Tensor]:
        """Return a number that follows from each query's keys, and its lowest score chosen and highest left out, (B, S, G or 2 G).

        `titan diff` reads them. 0 stands for a score that does not exist. In the stage "dense" there is no choice.
        """
        if self.scored is None:
            return {}
        visible = self.visible(chosen_BGSN.shape[2], chosen_BGSN.device)
        cuts = []
        for rows, scores in self._candidates(*self.scored, visible):  # pyrefly: ignore[bad-argument-count]
            chosen = chosen_BGSN[:, :, rows].long()
            lowest = scores.gather(-1, chosen).amin(-1)
            highest = scores.scatter(-1, chosen, -torch.inf).amax(-1)
            cuts.append(torch.cat([lowest, highest], 1))
        cut = torch.cat(cuts, -1).mT
        # Whole numbers of 20 bits, of which sums are exact in any order.
        numbers = (chosen_BGSN.long() * 0x9E3779B1 >> 12) % 2**20 - 2**19
        choice = numbers.sum(-1).mT.double()
        return {"choice": choice, "cut": cut.masked_fill(cut.isinf(), 0)}

    def _pool(self, scores_BGRT: Tensor, visible: Visible, rows: slice) -> Tensor:
        """Return the largest score of each block, infinite for the last ones of a query. There are as many blocks as tokens at most."""
        blocks_BT = visible.blocks_BT
        assert blocks_BT is not None
        at_BGRT = blocks_BT[:, None, None].expand_as(scores_BGRT)
        best = torch.full_like(scores_BGRT, -torch.inf)
        best = best.scatter_reduce(-1, at_BGRT, scores_BGRT, "amax")
        own_BR = blocks_BT[:, visible.positions_S[rows]]
        lowest_BR = blocks_BT.gather(1, visible.first_BS[:, rows])
        for back in range(self.local):
            at_BR = (own_BR - back).maximum(lowest_BR)
            at_BGR1 = at_BR[:, None, :, None].expand(*best.shape[:3], 1)
            best = best.scatter(-1, at_BGR1, torch.inf)
        return best

    def index(self, q_BSID: Tensor, k_BSD: Tensor, w_BSI: Tensor | None, weight: Any) -> Tensor:
        """Return the choice of keys from the indexer's queries, keys and weights. They are kept for its loss.

        Args:
            q_BSID: queries of the indexer.
            k_BSD: its keys.
            w_BSI: weights of its heads, None for one choice by head.
            weight: a parameter of the indexer, which tells how it is laid out.
        """
        self.tp = weight.device_mesh if isinstance(weight, DTensor) else None
        if self.stage == "dense":
            return q_BSID.new_zeros(1)  # attention sees all keys, and nothing is learned
        k_BTD = self.whole(k_BSD, 1)
        self.scored = q_BSID, k_BTD, w_BSI
        chosen: Any = None
        for source in self.route_sources:
            chosen = source.get(self, q_BSID) if chosen is None else chosen
        if chosen is None:
            visible = self.visible(q_BSID.shape[1], q_BSID.device)
            # A recomputation leaves it out, and counts products alike.
            choose = outside_selection(self.choose)
            chosen = choose(q_BSID, k_BTD, w_BSI, visible)
        for source in self.route_sources:
            source.put(self, chosen)
        return chosen

    def of_heads(self, x_BGRT: Tensor, heads: int) -> Tensor:
        """Return a mask of each choice as one of this rank's heads, (B, H, R, T) or (B, 1, R, T)."""
        return (
            x_BGRT if x_BGRT.shape[1] == 1 else x_BGRT[:, self.choices(x_BGRT.shape[1], heads)]
        )

    def choices(self, number: int, heads: int) -> Tensor:
        """Return the number of the choice of each of this rank's heads, (H,)."""
        is_part = (
            heads < self.heads and self.tp is not None
        )  # a model is tried with fewer heads
        first = self.tp.get_local_rank() * heads if is_part else 0
        return (torch.arange(heads) + first) * number // self.heads

    def attend(
        self,
        inner: Any,
        q_BHSK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        chosen_BGSN: Tensor,
    ) -> Tensor:
        """Return attention of this layer, (B, H, S, size of a value), and teach the indexer in the backward pass.

        Args:
            inner: attention that sees all keys.
            q_BHSK: queries.
            k_BHTK: keys, of all positions or of this rank's.
            v_BHTK: values.
            chosen_BGSN: the choice of this layer or of one before.
        """
        scored, self.scored = self.scored, None
        visible = self.visible(q_BHSK.shape[2], q_BHSK.device)
        scale = inner.scale or q_BHSK.shape[-1] ** -0.5
        if self.stage == "joint":
            if k_BHTK.shape[2] < visible.first_BT.shape[1]:
                k_BHTK, v_BHTK = self.whole(k_BHTK, 2), self.whole(v_BHTK, 2)
            tensors = q_BHSK, k_BHTK, v_BHTK, chosen_BGSN
            out = _ChosenAttention.apply(*tensors, visible, self, scale)
        else:
            out = inner(q_BHSK, k_BHTK, v_BHTK, self.documents)
        if scored is None or not scored[0].requires_grad:  # frozen, or in an evaluation
            return out
        target = q_BHSK.detach() * scale, k_BHTK.detach(), chosen_BGSN
        return IndexerLoss.apply(out, *scored, *target, visible, self)


def set_up(parts: Sequence[nn.Module], config: Any) -> None:
    """Set the factor of the loss, and the first stage, in the layers that choose their keys. An entry point of `titan.extensions`, step.NAME."""
    section = config.sparse_attention
    for part in parts:
        for module in modules_of(part, SparseAttention).values():
            module.loss_coeff = section.loss_coeff
            module.begin(section.stages[0])


def sparse_of(module: nn.Module) -> SparseAttention | None:
    """Return the `SparseAttention` of an attention module, or None if it does not choose keys."""
    found = module._modules.get("sparse")
    return found if isinstance(found, SparseAttention) else None


class _ChosenAttention(torch.autograd.Function):
    """Attention over chosen keys, some queries at a time. It keeps the choice, and no mask."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        chosen_BGSN: Tensor,
        visible: Visible,
        sparse: SparseAttention,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_BHSK, k_BHTK, v_BHTK, chosen_BGSN)
        ctx.rest = visible, sparse, scale
        parts = [
            _attend_rows(
                rows, q_BHSK[:, :, rows], k_BHTK, v_BHTK, chosen_BGSN, visible, sparse, scale
            )
            for rows in visible.chunks()
        ]
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_BHSK,), (q_BHSK, *kv, chosen_BGSN) = grads, ctx.saved_tensors
        of_queries = []
        sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in kv
        ]
        for rows in ctx.rest[0].chunks():
            own = [x.detach().requires_grad_() for x in (q_BHSK[:, :, rows], *kv)]
            with torch.enable_grad():
                out = _attend_rows(rows, *own, chosen_BGSN, *ctx.rest)  # pyrefly: ignore[bad-argument-count]
            of_q, *of_kv = torch.autograd.grad(out, own, grad_BHSK[:, :, rows])
            of_queries.append(of_q)
            for total, part in zip(sums, of_kv, strict=True):
                total += part
        of_kv = [total.to(x.dtype) for total, x in zip(sums, kv, strict=True)]
        return torch.cat(of_queries, dim=2), *of_kv, None, None, None, None


def _attend_rows(
    rows: slice,
    q_BHRK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    chosen_BGSN: Tensor,
    visible: Visible,
    sparse: SparseAttention,
    scale: float,
) -> Tensor:
    mask_BHRT = sparse.of_heads(visible.chosen(chosen_BGSN[:, :, rows], rows), q_BHRK.shape[1])
    k_BHTK, v_BHTK = match_heads(q_BHRK, k_BHTK, v_BHTK, has_mask=True)
    is_grouped = q_BHRK.shape[1] != k_BHTK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHRK, k_BHTK, v_BHTK, attn_mask=mask_BHRT, scale=scale, enable_gqa=is_grouped
    )


# ---- in the place of transformers' ---------------------------------------------------------------


def prepare_sparse_attention(model: Any) -> None:
    """Add `SparseAttention` to each layer that chooses its keys, as the child `sparse` of its attention.

    Args:
        model: the `TransformersModel`.
    """
    for block in model.layers.values():
        for name, module in [*block.named_modules()]:
            layer: Any = module
            indexer: Any = module._modules.get("indexer")
            kind = _INDEXERS.get(type(indexer).__name__)
            if kind is not None:
                forward, of = kind
                indexer.__dict__["sparse"] = layer.sparse = of(indexer)
                indexer.forward = MethodType(forward, indexer)
                indexer.record_choice = layer.sparse.record_choice
            elif vars(module).get("skip_topk"):
                layer.sparse = SparseAttention(keys=layer.config.index_topk)
            else:
                continue
            if "expand_kv" in dir(layer):
                layer.expand_kv = MethodType(_expand, module)
            module.register_forward_pre_hook(_begin, with_kwargs=True)
            block.traits = _without(block, name.partition(".")[0])
    kinds = {type(module) for module in modules_of(model, SequenceModule).values()}
    if SparseAttention in kinds and len(kinds) > 1:
        raise UnsupportedModelError("it has both linear attention and an indexer")


def _without(block: Any, attention: str) -> BlockTraits:
    """Return the traits of a block, of which attention is not compiled: it runs some queries at a time."""
    usual = BlockTraits(compiled=tuple(f"{name}.forward" for name, _ in block.named_children()))
    traits = vars(block).get("traits", usual)
    kept = [name for name in traits.compiled if name.partition(".")[0] != attention]
    return replace(traits, compiled=tuple(kept))


def _begin(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Begin the call of an attention module: its indexer gets neither documents nor a mask."""
    module.sparse.documents = kwargs.get("document_ids_BS")
    if kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": NO_MASK}
    return args, kwargs


def _expand(module: Any, latent_B1SL: Tensor, rotated_B1SK: Tensor) -> Any:
    """Return keys and values from latents, of all positions if attention chooses among them."""
    sparse = module.sparse
    if sparse.stage == "joint":
        latent_B1SL, rotated_B1SK = (sparse.whole(x, 2) for x in (latent_B1SL, rotated_B1SK))
    return type(module).expand_kv(module, latent_B1SL, rotated_B1SK)


def _index_tokens(
    rotation: str,
    indexer: Any,
    hidden_BSD: Tensor,
    q_BSL: Tensor,
    rotations: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the choice of an indexer of tokens, from hidden states and the latents of the queries."""
    hidden_BSD = hidden_BSD.detach()
    rotate = getattr(sys.modules[type(indexer).__module__], rotation)
    heads, size, rotated = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    q_BSID = indexer.wq_b(q_BSL.detach()).unflatten(-1, (heads, size))
    k_BS1D = indexer.k_norm(indexer.wk(hidden_BSD))[:, :, None]
    both = q_BSID, k_BS1D
    first = rotate(*(x[..., :rotated] for x in both), *rotations, unsqueeze_dim=2)
    pairs = zip(first, both, strict=True)
    q_BSID, k_BS1D = (torch.cat([x, whole[..., rotated:]], -1) for x, whole in pairs)
    weight = next(indexer.weights_proj.parameters())
    w_BSI = indexer.weights_proj(hidden_BSD.to(weight.dtype)).float() * heads**-0.5
    return indexer.sparse.index(q_BSID, k_BS1D[:, :, 0], w_BSI, weight)


def _index_blocks(
    indexer: Any, hidden_BSD: Tensor, rotations: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> Tensor:
    """Return the choice of an indexer of blocks, from hidden states."""
    hidden_BSD = hidden_BSD.detach()
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    size = indexer.head_dim
    q_BSID = indexer.q_norm(indexer.q_proj(hidden_BSD).unflatten(-1, (-1, size)))
    k_BS1D = indexer.k_norm(indexer.k_proj(hidden_BSD)[:, :, None])
    cos, sin = (x[..., :size] for x in rotations)
    q_BSID, k_BS1D = rotate(q_BSID, k_BS1D, cos, sin, unsqueeze_dim=2)
    weight = next(indexer.q_proj.parameters())
    return indexer.sparse.index(q_BSID, k_BS1D[:, :, 0], None, weight)


def _of_tokens(indexer: Any) -> SparseAttention:
    return SparseAttention(
        keys=indexer.index_topk,
        width=indexer.wq_b.out_features,
        scale=indexer.head_dim**-0.5,
    )


def _of_blocks(indexer: Any) -> SparseAttention:
    return SparseAttention(
        keys=indexer.topk_blocks,
        width=indexer.q_proj.out_features,
        block=indexer.block_size,
        local=indexer.local_blocks,
        scale=indexer.head_dim**-0.5,
    )


_INDEXERS: dict[str, Any] = {
    # Their rotations differ: of halves, and of neighbors.
    "DeepseekV32Indexer": (partial(_index_tokens, "apply_rotary_pos_emb"), _of_tokens),
    "GlmMoeDsaIndexer": (partial(_index_tokens, "apply_rotary_pos_emb_interleave"), _of_tokens),
    "MiniMaxM3VLIndexer": (_index_blocks, _of_blocks),
}
