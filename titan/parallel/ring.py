"""Attention of local queries to the keys and values of C ranks, exact, forward and backward.

Ring Attention (arXiv:2310.01889) sends keys and values around the ring. Each transfer hides behind the computation of a block.
In the backward pass the keys' gradients travel with the keys, and are complete when they return to the keys' own rank.
All-gather (Llama 3, arXiv:2407.21783 section 3.3.2) fetches all keys and values at once: one large collective instead of C small
ones, which hides only behind the rank's own block, and needs memory for all keys and values of one layer at a time.

Both compute the same blocks. The sequence is cut into 2C chunks, of which rank r holds chunk r (its head) and chunk 2C-1-r (its
tail), so that all ranks have equal work (zig-zag, also called head-tail or striped). The queries of rank r see

    its own keys            head and tail, causally
    keys of a rank before   the head only, from all queries
    keys of a rank after    head and tail, from the queries of its tail

An example with C = 2 ranks and 8 tokens: rank 0 holds the tokens 0, 1 (head) and 6, 7 (tail), rank 1 the tokens 2, 3 and 4, 5. Rank
0 sees the tokens 2 to 5 from its queries 6 and 7; rank 1 sees the tokens 0 and 1 from all its queries. Each computes half of a
block.

With contiguous parts, a rank sees all keys of the ranks before it, and none of the ranks after it. Only a rank's own block needs
a mask, unless documents are packed: then each block has a dense mask of its documents. With a window, blocks are pairs of chunks,
cut to the queries and keys that are near enough, and chunks beyond the window are not computed. Attention that is not causal sees
all keys of all ranks. Blocks are merged in fp32 by their logsumexp: out = sum_b out_b exp(lse_b - lse).

Transfers are functional collectives (a rotation is an all-to-all in which every rank sends to one rank only). torch.compile and
a simulator see them, and no point-to-point communicators are made beside the group's own.

B batch, S local positions, T joined key positions, H query heads, G key/value heads, K head dim, N source ranks,
2 keys and values
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_sinks import add_sinks, sinks_gradient
from .block_attention import (
    CAUSAL,
    AttentionSpec,
    attend,
    attend_backward,
)
from .collectives import start_all_gather, start_all_to_all, start_reduce_scatter, wait


class SequencePart(NamedTuple):
    """The part of the sequence that this rank holds.

    Attributes:
        group: name of the process group of the ranks that hold all parts.
        rank: rank in this group.
        size: number of ranks in this group.
        balanced: the part is a head and a tail, and not contiguous.
    """

    group: str
    rank: int
    size: int
    balanced: bool


def chunks_held(size: int, balanced: bool) -> list[int]:
    """Return the numbers of the sequence's chunks that ranks 0, 1, ... hold, in the order of ranks."""
    if not balanced:
        return list(range(size))
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


class VisibleBlock(NamedTuple):
    """Some queries and the keys of source ranks that they see, as slices of local positions.

    Attributes:
        queries: local positions of the queries.
        keys: local positions of the keys on each source rank.
        causal: a query sees no key after itself.
        distance: number of positions from the first key to the first query, if there is a window.
    """

    queries: slice
    keys: slice
    causal: bool
    distance: int = 0


def ring_attention(
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    part: SequencePart,
    gather: bool,
    scale: float | None = None,
    ids_BCS: Tensor | None = None,
    spec: AttentionSpec = CAUSAL,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention over the whole sequence, (B, H, S, K), for the queries of this rank.

    Args:
        q_BHSK: queries of this rank.
        k_BGSK: keys of this rank.
        v_BGSK: values of this rank.
        part: the part of the sequence that this rank holds.
        gather: all-gather keys and values at once instead of sending them around the ring.
        scale: factor of the scores. None: 1 / sqrt(K).
        ids_BCS: document ids of the positions of all ranks, (B, C, S). None: documents do not limit attention.
        spec: keys of its document that a query sees.
        sinks_H: a logit of each head that joins the softmax, with the value zero.
    """
    options = part, gather, scale, spec
    return _BlockwiseAttention.apply(q_BHSK, k_BGSK, v_BGSK, options, ids_BCS, sinks_H)


def visible(
    sources: range, *, part: SequencePart, length: int, spec: AttentionSpec = CAUSAL
) -> list[VisibleBlock]:
    """Return the blocks of `sources` that the queries of `part` see.

    Args:
        sources: source ranks, all before the rank of `part`, all after it, or the rank itself. With a window, one rank.
        part: the part of the sequence that the queries' rank holds.
        length: number of local positions, S.
        spec: keys that a query sees.
    """
    if spec.window:
        return list(_within_window(sources.start, part, length, spec.window))
    # Slices of the local positions. With `balanced`, the first half is the head and the second half is the tail.
    everything, half = slice(0, length), length // 2
    if not spec.causal:
        return [VisibleBlock(everything, everything, causal=False)]
    if part.rank in sources:
        return [VisibleBlock(everything, everything, causal=True)]
    if sources.stop <= part.rank:
        keys = slice(0, half) if part.balanced else everything
        return [VisibleBlock(everything, keys, causal=False)]
    return (
        [VisibleBlock(slice(half, length), everything, causal=False)] if part.balanced else []
    )


def _within_window(
    source: int, part: SequencePart, length: int, window: int
) -> Iterator[VisibleBlock]:
    """Yield the pairs of a rank's chunk and a source's chunk in which a query sees a key. A query's own chunk comes first."""
    num_chunks = 2 if part.balanced else 1
    size = length // num_chunks
    mine, theirs = ((r, 2 * part.size - 1 - r)[:num_chunks] for r in (part.rank, source))
    for i, j in product(range(num_chunks), reversed(range(num_chunks))):
        distance = (mine[i] - theirs[j]) * size
        # Only the first queries and the last keys are near enough.
        near = min(size, size + window - 1 - distance)
        if distance >= 0 and near > 0:
            queries = slice(i * size, i * size + near)
            keys = slice((j + 1) * size - near, (j + 1) * size)
            yield VisibleBlock(queries, keys, distance == 0, distance - size + near)


def visible_keys(
    block: VisibleBlock,
    sources: range,
    ids_BCS: Tensor | None,
    part: SequencePart,
    spec: AttentionSpec,
    device: torch.device,
) -> dict[str, Any]:
    """Return the keys of a block that its queries see: a spec and a mask, as arguments of `attend`.

    Args:
        block: the block.
        sources: source ranks of its keys.
        ids_BCS: document ids of the positions of all ranks, or None.
        part: the part of the sequence that the queries' rank holds.
        spec: keys that a query of the whole sequence sees.
        device: device of the mask.
    """
    size = block.queries.stop - block.queries.start
    # The last query and the first key of a block have the largest distance.
    is_cut = 0 < spec.window < block.distance + size
    window = spec.window if is_cut and block.causal else 0
    seen: dict[str, Any] = {"spec": AttentionSpec(block.causal, window), "mask_BST": None}
    if is_cut and not (block.causal and ids_BCS is None):
        at_S = torch.arange(size, device=device)
        seen["mask_BST"] = spec.sees(block.distance + at_S[:, None], at_S)[None]
    if ids_BCS is not None:
        ids_BS = ids_BCS[:, part.rank, block.queries]
        ids_BT = ids_BCS[:, sources.start : sources.stop, block.keys].flatten(1)
        same_BST = ids_BS[:, :, None] == ids_BT[:, None]
        if is_cut:
            seen["mask_BST"] = seen["mask_BST"] & same_BST
        else:
            seen["mask_BST"] = same_BST.tril() if block.causal else same_BST
    return seen


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *others: Any
    ) -> Tensor:
        ctx.options, ids_BCS, sinks_H = others
        part, gather, scale, spec = ctx.options
        # Sums over blocks are kept in fp32 at least.
        total_BHSK = total_lse_BHS = None
        precise = torch.promote_types(q_BHSK.dtype, torch.float32)
        if spec.window:  # the chunks of the own rank come one by one, too
            total_BHSK = torch.zeros_like(q_BHSK, dtype=precise)
            total_lse_BHS = torch.full_like(total_BHSK[..., 0], float("-inf"))
        for sources, kv_N2BGSK in _arrivals(k_BGSK, v_BGSK, part, gather, spec):
            for block in visible(sources, part=part, length=q_BHSK.shape[2], spec=spec):
                k_BGTK, v_BGTK = _join(kv_N2BGSK, block.keys)
                seen = visible_keys(block, sources, ids_BCS, part, spec, q_BHSK.device)
                q = q_BHSK[:, :, block.queries]
                out_BHSK, lse_BHS = attend(q, k_BGTK, v_BGTK, scale=scale, **seen)
                if total_BHSK is None or total_lse_BHS is None:  # the own block has all queries
                    # Copies, since activation checkpointing may keep attention's results, which must not change.
                    total_BHSK = out_BHSK.to(precise, copy=True)
                    total_lse_BHS = lse_BHS.to(
                        precise, copy=True, memory_format=torch.contiguous_format
                    )
                else:
                    rows = (slice(None), slice(None), block.queries)
                    merge_softmax(total_BHSK[rows], total_lse_BHS[rows], out_BHSK, lse_BHS)
        assert total_BHSK is not None and total_lse_BHS is not None, (
            "the own block is always visited"
        )
        if sinks_H is not None:
            total_BHSK, total_lse_BHS = add_sinks(total_BHSK, total_lse_BHS, sinks_H)
        # A copy even if the dtype is the same: compiled by torch 2.11, a tensor changed in place that is
        # returned and saved comes back in backward as it was before the changes.
        out_BHSK = total_BHSK.to(q_BHSK.dtype, copy=True)
        ctx.save_for_backward(q_BHSK, k_BGSK, v_BGSK, out_BHSK, total_lse_BHS, ids_BCS, sinks_H)
        return out_BHSK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSK, k_BGSK, v_BGSK, out_BHSK, lse_BHS, ids_BCS, sinks_H = ctx.saved_tensors
        rows_of = (grads[0].contiguous(), q_BHSK, out_BHSK, lse_BHS)
        part, gather, scale, spec = ctx.options
        # dq stays on this rank. The gradients of keys travel with the keys.
        dq_BHSK = torch.zeros_like(q_BHSK, dtype=lse_BHS.dtype)
        gathered: dict[int, Tensor] = {}  # by first source rank
        traveling = None
        for sources, kv_N2BGSK in _arrivals(k_BGSK, v_BGSK, part, gather, spec):
            dkv_N2BGSK = torch.zeros_like(kv_N2BGSK, dtype=lse_BHS.dtype)
            for block in visible(sources, part=part, length=q_BHSK.shape[2], spec=spec):
                seen = visible_keys(block, sources, ids_BCS, part, spec, q_BHSK.device)
                _add_block_gradient(
                    dq_BHSK, dkv_N2BGSK, kv_N2BGSK, rows_of, block, {"scale": scale, **seen}
                )
            if gather:
                gathered[sources.start] = dkv_N2BGSK
                continue
            # They arrived during this block, with the sums of the ranks before.
            if traveling is not None:
                dkv_N2BGSK += wait(traveling)
            traveling = _pass_on(dkv_N2BGSK, part)
        if gather:
            # Each rank has a partial sum of every rank's gradient: (C, 2, B, G, S, K) -> (1, 2, B, G, S, K).
            whole = torch.cat([gathered[start] for start in sorted(gathered)])
            traveling = start_reduce_scatter(whole, group=part.group, size=part.size)
        assert traveling is not None, "the own block is always visited"
        # In both methods, the sum over all ranks is now on the rank that owns the keys.
        dk_BGSK, dv_BGSK = wait(traveling)[0].to(k_BGSK.dtype).unbind(0)
        d_sinks_H = None
        if sinks_H is not None:
            d_sinks_H = sinks_gradient(grads[0], out_BHSK, lse_BHS, sinks_H)
        return dq_BHSK.to(q_BHSK.dtype), dk_BGSK, dv_BGSK, None, None, d_sinks_H


def _add_block_gradient(
    dq_BHSK: Tensor,
    dkv_N2BGSK: Tensor,
    kv_N2BGSK: Tensor,
    rows_of: tuple[Tensor, Tensor, Tensor, Tensor],
    block: VisibleBlock,
    options: dict[str, Any],
) -> None:
    """Add one block's gradients to dq and dkv, in place. rows_of: gradient of the output, queries, output, logsumexp."""
    grad_BHSK, q_BHSK, out_BHSK, lse_BHS = (x[:, :, block.queries] for x in rows_of)
    k_BGTK, v_BGTK = _join(kv_N2BGSK, block.keys)
    rows = grad_BHSK, q_BHSK, k_BGTK, v_BGTK, out_BHSK, lse_BHS
    dq, dk_BGTK, dv_BGTK = attend_backward(*rows, **options)
    dq_BHSK[:, :, block.queries] += dq
    for i, gradient in enumerate((dk_BGTK, dv_BGTK)):
        dkv_N2BGSK[:, i, :, :, block.keys] += _split(gradient, kv_N2BGSK.shape[0])


def merge_softmax(
    total_BHSK: Tensor, total_lse_BHS: Tensor, out_BHSK: Tensor, lse_BHS: Tensor
) -> None:
    """Add a block to the totals of attention, in place.

    Args:
        total_BHSK: sum over earlier blocks, weighted by softmax.
        total_lse_BHS: its logsumexp.
        out_BHSK: output of the block.
        lse_BHS: logsumexp of the block.
    """
    lse = torch.logaddexp(total_lse_BHS, lse_BHS)
    total_BHSK *= (total_lse_BHS - lse).exp()[..., None]
    total_BHSK += out_BHSK * (lse_BHS - lse).exp()[..., None]
    total_lse_BHS.copy_(lse)


def _arrivals(
    k_BGSK: Tensor, v_BGSK: Tensor, part: SequencePart, gather: bool, spec: AttentionSpec
) -> Iterator[tuple[range, Tensor]]:
    """Yield source ranks and their keys and values (N, 2, B, G, S, K), the rank's own first. With a window, one by one."""
    own, rank, size = torch.stack([k_BGSK, v_BGSK])[None], part.rank, part.size
    if gather:
        # (2, B, G, S, K) on each rank -> (C, 2, B, G, S, K) on all, while the own block is computed.
        pending = start_all_gather(own, group=part.group, size=size)
        yield range(rank, rank + 1), own
        everyone = wait(pending)
        others = (range(rank), range(rank + 1, size))
        if spec.window:
            others = (range(source, source + 1) for source in chain(*others))
        for sources in others:
            if len(sources) > 0:
                yield sources, everyone[sources.start : sources.stop]
        return
    held = own
    for step in range(size):
        # The next transfer starts before this block is computed, so the computation hides it.
        coming = None if step == size - 1 else _pass_on(held, part)
        source = (rank - step) % size
        yield range(source, source + 1), held
        if coming is not None:
            held = wait(coming)


def _pass_on(x: Tensor, part: SequencePart) -> Tensor:
    """Start to send x to the next rank. Return the tensor from the rank before, valid after `wait`."""
    to_next, from_previous = [0] * part.size, [0] * part.size
    to_next[(part.rank + 1) % part.size] = x.shape[0]
    from_previous[(part.rank - 1) % part.size] = x.shape[0]
    return start_all_to_all(x, group=part.group, to=to_next, from_=from_previous)


def _join(kv_N2BGSK: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of all sources, one source after the other: (B, G, T, K) each."""
    kv_2BGNSK = kv_N2BGSK[..., keys, :].permute(1, 2, 3, 0, 4, 5)
    k_BGTK, v_BGTK = kv_2BGNSK.flatten(3, 4).unbind(0)
    return k_BGTK, v_BGTK


def _split(x_BGTK: Tensor, num_sources: int) -> Tensor:
    """Split joined keys or values by source: (B, G, T, K) -> (N, B, G, S, K)."""
    return x_BGTK.unflatten(2, (num_sources, -1)).movedim(2, 0)
