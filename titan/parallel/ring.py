"""Compute attention of local queries over keys and values on C ranks, exact, forward and backward.

Ring Attention (arXiv:2310.01889) sends keys and values around the ring, each transfer hidden behind the block
computed meanwhile; in backward their gradients travel with them and arrive home complete. All-gather (Llama 3,
arXiv:2407.21783 section 3.3.2) fetches all of them at once: one big collective instead of C small ones, hidden
only behind the own block, and whole keys and values in memory for one layer at a time.

Both visit the same blocks. With the sequence cut in 2C chunks of which rank r holds chunks r (its head) and
2C-1-r (its tail), so that all ranks have equal work (zig-zag, also called head-tail or striped), rank r sees of

    itself            its own head and tail, causally
    a rank before it  the head only, with all queries
    a rank after it   head and tail, with the tail's queries

and with contiguous parts everything before, nothing after. No block but the own one needs a mask, unless documents are packed:
then each block has a dense one of its documents. With a window, blocks are pairs of chunks, cut to the queries and keys that are
near enough: nothing is computed for chunks beyond it. Attention that is not causal sees everything of every rank. Blocks are merged in fp32 by their logsumexp: out = sum_b out_b exp(lse_b - lse).

Transfers are functional collectives (a rotation is an all-to-all in which every rank sends to one only), so that
torch.compile and a simulator see them, and no point-to-point communicators appear beside the group's own.

B batch, S local positions, T joined key positions, H query heads, G key/value heads, K head dim, N source ranks,
2 keys and values
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_attention import (
    CAUSAL,
    AttentionSpec,
    add_sinks,
    attend,
    attend_backward,
    sinks_gradient,
)
from .collectives import start_all_gather, start_all_to_all, start_reduce_scatter, wait


class SequencePart(NamedTuple):
    """Say which part of the sequence this rank holds: `rank` of `size`, head and tail if `balanced`.

    group: name of the process group of the ranks that hold the others.
    """

    group: str
    rank: int
    size: int
    balanced: bool


class VisibleBlock(NamedTuple):
    """Say what some queries see of some source ranks, as slices of their local positions.

    distance: by how many positions the first query comes after the first key, where there is a window.
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
    """Return the attention output (B, H, S, K) over the whole sequence.

    Args:
        gather: fetch all keys at once, no ring.
        scale: of the products of queries and keys; None: 1 / sqrt(K).
        ids_BCS: the documents of all ranks' positions, (B, C, S); None: a query sees those of all documents.
        spec: which of these positions a query sees.
        sinks_H: a logit of each head that joins the softmax, without a value.
    """
    options = part, gather, scale, spec
    return _BlockwiseAttention.apply(q_BHSK, k_BGSK, v_BGSK, options, ids_BCS, sinks_H)


def visible(
    sources: range, *, part: SequencePart, length: int, spec: AttentionSpec = CAUSAL
) -> list[VisibleBlock]:
    """Return what `part` sees of `sources`, all of them before it, after it, or itself; with a window, of one source.

    length: number of local positions.
    """
    if spec.window:
        return list(_within_window(sources.start, part, length, spec.window))
    # Slices of the local positions. With `balanced` the first half is the head, the second the tail.
    everything, half = slice(0, length), length // 2
    if not spec.causal:
        return [VisibleBlock(everything, everything, causal=False)]
    if part.rank in sources:
        return [VisibleBlock(everything, everything, causal=True)]
    if sources.stop <= part.rank:
        keys = slice(0, half) if part.balanced else everything
        return [VisibleBlock(everything, keys, causal=False)]
    return [VisibleBlock(slice(half, length), everything, causal=False)] if part.balanced else []


def _within_window(
    source: int, part: SequencePart, length: int, window: int
) -> Iterator[VisibleBlock]:
    """Yield the pairs of a rank's and a source's chunks in which a query sees a key. A query's own chunk comes first."""
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
    """Return which keys of a block its queries see, as arguments of `attend`."""
    size = block.queries.stop - block.queries.start
    # Its last query and first key are the farthest from each other.
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
    def forward(ctx: Any, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *others: Any) -> Tensor:
        ctx.options, ids_BCS, sinks_H = others
        part, gather, scale, spec = ctx.options
        # Sums over blocks are kept in fp32 at least.
        total_BHSK = total_lse_BHS = None
        precise = torch.promote_types(q_BHSK.dtype, torch.float32)
        if spec.window:  # of the own rank, chunks come one by one
            total_BHSK = torch.zeros_like(q_BHSK, dtype=precise)
            total_lse_BHS = torch.full_like(total_BHSK[..., 0], float("-inf"))
        for sources, kv_N2BGSK in _arrivals(k_BGSK, v_BGSK, part, gather, spec):
            for block in visible(sources, part=part, length=q_BHSK.shape[2], spec=spec):
                k_BGTK, v_BGTK = _join(kv_N2BGSK, block.keys)
                seen = visible_keys(block, sources, ids_BCS, part, spec, q_BHSK.device)
                q = q_BHSK[:, :, block.queries]
                out_BHSK, lse_BHS = attend(q, k_BGTK, v_BGTK, scale=scale, **seen)
                if total_BHSK is None or total_lse_BHS is None:  # the own block: all rows
                    # Copies: activation checkpointing may keep what attention returned, and it must stay as it is.
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
        # A copy also where the dtype is the same: compiled by torch 2.11, a tensor changed in place that is
        # returned and saved comes back in backward as it was before the changes.
        out_BHSK = total_BHSK.to(q_BHSK.dtype, copy=True)
        ctx.save_for_backward(q_BHSK, k_BGSK, v_BGSK, out_BHSK, total_lse_BHS, ids_BCS, sinks_H)
        return out_BHSK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSK, k_BGSK, v_BGSK, out_BHSK, lse_BHS, ids_BCS, sinks_H = ctx.saved_tensors
        rows_of = (grads[0].contiguous(), q_BHSK, out_BHSK, lse_BHS)
        part, gather, scale, spec = ctx.options
        # dq stays here, and keys' gradients travel with their keys.
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
            # They arrived, with what the ranks before added, during this block.
            if traveling is not None:
                dkv_N2BGSK += wait(traveling)
            traveling = _pass_on(dkv_N2BGSK, part)
        if gather:
            # Each rank has a share of every rank's gradient: (C, 2, B, G, S, K) -> (1, 2, B, G, S, K).
            whole = torch.cat([gathered[start] for start in sorted(gathered)])
            traveling = start_reduce_scatter(whole, group=part.group, size=part.size)
        assert traveling is not None, "the own block is always visited"
        # By either way, the sum over all ranks is now at the rank that owns the keys.
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
    """Add one block's gradients to dq and dkv, in place. rows_of: gradient of the output, q, output, logsumexp."""
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
    """Add a block to the totals, in place."""
    lse = torch.logaddexp(total_lse_BHS, lse_BHS)
    total_BHSK *= (total_lse_BHS - lse).exp()[..., None]
    total_BHSK += out_BHSK * (lse_BHS - lse).exp()[..., None]
    total_lse_BHS.copy_(lse)


def _arrivals(
    k_BGSK: Tensor, v_BGSK: Tensor, part: SequencePart, gather: bool, spec: AttentionSpec
) -> Iterator[tuple[range, Tensor]]:
    """Yield source ranks and their keys and values (N, 2, B, G, S, K), the own ones first. With a window, they come one by one."""
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
        # The next transfer starts before this block is computed, so it hides behind it.
        coming = None if step == size - 1 else _pass_on(held, part)
        source = (rank - step) % size
        yield range(source, source + 1), held
        if coming is not None:
            held = wait(coming)


def _pass_on(x: Tensor, part: SequencePart) -> Tensor:
    """Send x to the next rank and return, at once, what will come from the one before."""
    to_next, from_previous = [0] * part.size, [0] * part.size
    to_next[(part.rank + 1) % part.size] = x.shape[0]
    from_previous[(part.rank - 1) % part.size] = x.shape[0]
    return start_all_to_all(x, group=part.group, to=to_next, from_=from_previous)


def _join(kv_N2BGSK: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Join keys and values of all sources, one after the other: (B, G, T, K) each."""
    kv_2BGNSK = kv_N2BGSK[..., keys, :].permute(1, 2, 3, 0, 4, 5)
    k_BGTK, v_BGTK = kv_2BGNSK.flatten(3, 4).unbind(0)
    return k_BGTK, v_BGTK


def _split(x_BGTK: Tensor, num_sources: int) -> Tensor:
    """Split again what was joined: (N, B, G, S, K)."""
    return x_BGTK.unflatten(2, (num_sources, -1)).movedim(2, 0)
