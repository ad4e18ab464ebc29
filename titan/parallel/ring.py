"""Compute causal attention of local queries over keys and values on C ranks, exact, forward and backward.

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
then each block has a dense one of its documents. Blocks are merged in fp32 by their logsumexp: out = sum_b out_b exp(lse_b - lse).

Transfers are functional collectives (a rotation is an all-to-all in which every rank sends to one only), so that
torch.compile and a simulator see them, and no point-to-point communicators appear beside the group's own.

B batch, S local positions, T joined key positions, H query heads, G key/value heads, K head dim, N source ranks,
2 keys and values
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_attention import attend, attend_backward
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
    """Say what some queries see of some source ranks, as slices of their local positions."""

    queries: slice
    keys: slice
    causal: bool


def ring_attention(
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    *,
    part: SequencePart,
    gather: bool,
    scale: float | None = None,
    ids_BCS: Tensor | None = None,
) -> Tensor:
    """Return the causal attention output (B, H, S, K) over the whole sequence.

    Args:
        gather: fetch all keys at once, no ring.
        scale: of the products of queries and keys; None: 1 / sqrt(K).
        ids_BCS: the documents of all ranks' positions, (B, C, S); None: a query sees all documents before it.
    """
    return _BlockwiseAttention.apply(q_BHSK, k_BGSK, v_BGSK, part, gather, scale, ids_BCS)


def visible(sources: range, *, part: SequencePart, length: int) -> VisibleBlock | None:
    """Return what `part` sees of `sources`, all of them before it, after it, or itself; None: nothing.

    length: number of local positions.
    """
    # Slices of the local positions. With `balanced` the first half is the head, the second the tail.
    everything, half = slice(0, length), length // 2
    if part.rank in sources:
        return VisibleBlock(everything, everything, causal=True)
    if sources.stop <= part.rank:
        return VisibleBlock(
            everything, slice(0, half) if part.balanced else everything, causal=False
        )
    return VisibleBlock(slice(half, length), everything, causal=False) if part.balanced else None


def _mask_of(
    ids_BCS: Tensor | None, sources: range, block: VisibleBlock, part: SequencePart
) -> Tensor | None:
    """Return which keys of a block are in a query's document, and in the own block not after it: (B, S, T)."""
    if ids_BCS is None:
        return None
    ids_BS = ids_BCS[:, part.rank, block.queries]
    ids_BT = ids_BCS[:, sources.start : sources.stop, block.keys].flatten(1)
    mask_BST = ids_BS[:, :, None] == ids_BT[:, None]
    return mask_BST.tril() if block.causal else mask_BST


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *options: Any) -> Tensor:
        part, gather, scale, ids_BCS = options
        ctx.options = part, gather, scale
        # Sums over blocks are kept in fp32 at least.
        total_BHSK = total_lse_BHS = None
        precise = torch.promote_types(q_BHSK.dtype, torch.float32)
        for sources, kv_N2BGSK in _arrivals(torch.stack([k_BGSK, v_BGSK]), part, gather):
            block = visible(sources, part=part, length=q_BHSK.shape[2])
            if block is None:
                continue
            k_BGTK, v_BGTK = _join(kv_N2BGSK, block.keys)
            mask_BST = _mask_of(ids_BCS, sources, block, part)
            q = q_BHSK[:, :, block.queries]
            out_BHSK, lse_BHS = attend(
                q, k_BGTK, v_BGTK, causal=block.causal, scale=scale, mask_BST=mask_BST
            )
            if total_BHSK is None or total_lse_BHS is None:  # the own block comes first: all rows
                # Copies: activation checkpointing may keep what attention returned, and it must stay as it is.
                total_BHSK = out_BHSK.to(precise, copy=True)
                total_lse_BHS = lse_BHS.to(
                    precise, copy=True, memory_format=torch.contiguous_format
                )
            else:
                rows = (slice(None), slice(None), block.queries)
                _merge(total_BHSK[rows], total_lse_BHS[rows], out_BHSK, lse_BHS)
        assert total_BHSK is not None, "the own block is always visited"
        # A copy also where the dtype is the same: compiled by torch 2.11, a tensor changed in place that is
        # returned and saved comes back in backward as it was before the changes.
        out_BHSK = total_BHSK.to(q_BHSK.dtype, copy=True)
        ctx.save_for_backward(q_BHSK, k_BGSK, v_BGSK, out_BHSK, total_lse_BHS, ids_BCS)
        return out_BHSK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSK, k_BGSK, v_BGSK, out_BHSK, lse_BHS, ids_BCS = ctx.saved_tensors
        rows_of = (grads[0].contiguous(), q_BHSK, out_BHSK, lse_BHS)
        part, gather, scale = ctx.options
        # dq stays here, and keys' gradients travel with their keys.
        dq_BHSK = torch.zeros_like(q_BHSK, dtype=lse_BHS.dtype)
        gathered: dict[int, Tensor] = {}  # by first source rank
        traveling = None
        for sources, kv_N2BGSK in _arrivals(torch.stack([k_BGSK, v_BGSK]), part, gather):
            block = visible(sources, part=part, length=q_BHSK.shape[2])
            dkv_N2BGSK = torch.zeros_like(kv_N2BGSK, dtype=lse_BHS.dtype)
            if block is not None:
                mask_BST = _mask_of(ids_BCS, sources, block, part)
                _add_block_gradient(dq_BHSK, dkv_N2BGSK, kv_N2BGSK, rows_of, block, scale, mask_BST)
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
        return dq_BHSK.to(q_BHSK.dtype), dk_BGSK, dv_BGSK, None, None, None, None


def _add_block_gradient(
    dq_BHSK: Tensor,
    dkv_N2BGSK: Tensor,
    kv_N2BGSK: Tensor,
    rows_of: tuple[Tensor, Tensor, Tensor, Tensor],
    block: VisibleBlock,
    scale: float | None,
    mask_BST: Tensor | None,
) -> None:
    """Add one block's gradients to dq and dkv, in place. rows_of: gradient of the output, q, output, logsumexp."""
    grad_BHSK, q_BHSK, out_BHSK, lse_BHS = (x[:, :, block.queries] for x in rows_of)
    k_BGTK, v_BGTK = _join(kv_N2BGSK, block.keys)
    options = {"causal": block.causal, "scale": scale, "mask_BST": mask_BST}
    rows = grad_BHSK, q_BHSK, k_BGTK, v_BGTK, out_BHSK, lse_BHS
    dq, dk_BGTK, dv_BGTK = attend_backward(*rows, **options)
    dq_BHSK[:, :, block.queries] += dq
    for i, gradient in enumerate((dk_BGTK, dv_BGTK)):
        dkv_N2BGSK[:, i, :, :, block.keys] += _split(gradient, kv_N2BGSK.shape[0])


def _merge(total_BHSK: Tensor, total_lse_BHS: Tensor, out_BHSK: Tensor, lse_BHS: Tensor) -> None:
    """Add a block to the totals, in place."""
    lse = torch.logaddexp(total_lse_BHS, lse_BHS)
    total_BHSK *= (total_lse_BHS - lse).exp()[..., None]
    total_BHSK += out_BHSK * (lse_BHS - lse).exp()[..., None]
    total_lse_BHS.copy_(lse)


def _arrivals(kv_2BGSK: Tensor, part: SequencePart, gather: bool) -> Iterator[tuple[range, Tensor]]:
    """Yield source ranks and their keys and values (N, 2, B, G, S, K), the own ones first."""
    own, rank, size = kv_2BGSK[None], part.rank, part.size
    if gather:
        # (2, B, G, S, K) on each rank -> (C, 2, B, G, S, K) on all, while the own block is computed.
        pending = start_all_gather(own, group=part.group, size=size)
        yield range(rank, rank + 1), own
        everyone = wait(pending)
        for sources in (range(rank), range(rank + 1, size)):
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
