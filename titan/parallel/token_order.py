"""Reordering and counting of tokens, for mixtures of experts and for their token dispatch.

It imports torch only, so that models and helpers may import it. N tokens, D model
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_counts(counts: Tensor, *, num_tokens: int) -> list[int]:
    """Return integer counts from the device. The host waits for them.

    Args:
        counts: integers, of one dimension.
        num_tokens: number of tokens that this rank holds. The simulator, which has no counts, spreads them evenly, and so does
            this function on meta.
    """
    if counts.is_meta:
        each, rest = divmod(num_tokens, len(counts))
        return [each + (number < rest) for number in range(len(counts))]
    return counts.tolist()


def inverted(order_N: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 (N,)."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def transposed_blocks(counts_AB: Tensor, num_tokens: int) -> Tensor:
    """Return the place of each token when blocks sorted by row are to be sorted by column, int64 (N,).

    Args:
        counts_AB: tokens of each block, int64.
        num_tokens: their sum, which the host knows.
    """
    counts_BA = counts_AB.mT.contiguous()
    starts_AB = (counts_AB.flatten().cumsum(0) - counts_AB.flatten()).view_as(counts_AB)
    goals_BA = (counts_BA.flatten().cumsum(0) - counts_BA.flatten()).view_as(counts_BA)
    moves_N = (
        (goals_BA.mT - starts_AB)
        .flatten()
        .repeat_interleave(counts_AB.flatten(), output_size=num_tokens)
    )
    return moves_N + torch.arange(num_tokens, device=counts_AB.device)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N, inverse_N)
        return tokens_ND[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        order_N, inverse_N = ctx.saved_tensors
        return permute(grads[0], inverse_N, order_N), None, None


def permute(tokens_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Return tokens in another order. The gradient is a look-up by the inverse order, not a sum into places.

    Args:
        tokens_ND: tokens, (N, D).
        order_N: for each place in the result, the place of its token, int64 (N,).
        inverse_N: inverse permutation of order_N, int64 (N,).
    """
    return _Permute.apply(tokens_ND, order_N, inverse_N)
