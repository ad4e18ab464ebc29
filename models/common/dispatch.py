"""Way of tokens to their experts and back, on one rank. titan/parallel/expert.py has the way to other ranks.

T tokens, D model, E experts, e experts of this rank, K experts of a token; N = T K copies of tokens to dispatch, R copies that arrived
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titan.parallel.token_order import inverted, permute


def dispatch(
    x_TD: Tensor,
    ids_TK: Tensor,
    num_experts: int,
    dispatcher: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the outputs of each token's experts, (T, K, D).

    Args:
        x_TD: tokens.
        ids_TK: experts of each token, int64.
        num_experts: number of experts.
        dispatcher: function of tokens sorted by expert, (N, D), and of their counts, (E,), that returns the experts' outputs.
    """
    inverse_N, counts_E = places_by_expert(ids_TK, num_experts)
    order_N = inverted(inverse_N)
    tokens_ND = Spread.apply(x_TD, order_N, inverse_N, ids_TK.shape[1])
    # Sums run in the order of K: on a GPU, index_add into tokens would have no fixed order.
    results_ND = permute(dispatcher(tokens_ND, counts_E), inverse_N, order_N)
    return results_ND.unflatten(0, ids_TK.shape)


def places_by_expert(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the place of each copy (T, K) in the order by expert, then by token, int64 (N,), and the copies of each expert, int64 (E,).

    It counts: nothing is sorted. A copy's place is the number of copies for smaller experts, plus that of earlier copies for its own.

    Args:
        ids_TK: experts of each token, int64. A token may name an expert twice.
        num_experts: number of experts.
    """
    # Tokens are the last dimension: along another one, a GPU has one thread for each expert's sum, and takes 70 times as long.
    ids_KT = ids_TK.mT.contiguous()
    chosen_ET = ids_TK.new_zeros(num_experts, len(ids_TK), dtype=torch.int32)
    chosen_ET.scatter_add_(0, ids_KT, torch.ones_like(ids_KT, dtype=torch.int32))
    upto_ET = chosen_ET.cumsum(1, dtype=torch.int32)
    counts_E = chosen_ET.sum(1)
    # Copies for smaller experts, and those of earlier tokens for the same one.
    before_ET = upto_ET - chosen_ET + (counts_E.cumsum(0) - counts_E)[:, None]
    same_TKK = (ids_TK[:, :, None] == ids_TK[:, None, :]).tril(-1)
    places_TK = before_ET.gather(0, ids_KT).mT + same_TKK.sum(-1)
    return places_TK.flatten(), counts_E


def run_experts(
    tokens_ND: Tensor,
    counts_E: Tensor,
    experts: Callable[..., Tensor],
    meanwhile: Callable[[], None],
) -> Tensor:
    """Run tokens sorted by expert through the experts: the dispatcher of a rank that has all of them.

    A dispatcher calls `meanwhile` while it communicates.
    """
    tokens_ND = experts(tokens_ND, counts_E)
    meanwhile()
    return tokens_ND


def in_chunks(
    products: Callable[..., Tensor],
    size: int,
    tokens_RD: Tensor,
    counts_e: Tensor,
    *weights: Tensor,
) -> Tensor:
    """Apply experts to `size` tokens at a time, and recompute each chunk in the backward pass. 0: to all tokens at once.

    Args:
        products: function of tokens, counts and weights that returns the experts' outputs.
        size: tokens of a chunk.
        tokens_RD: tokens sorted by expert.
        counts_e: number of tokens of each expert, int64.
        *weights: the experts' parameters.
    """
    if not 0 < size < len(tokens_RD):
        return products(tokens_RD, counts_e, *weights)
    ends_e, chunks = counts_e.cumsum(0), []
    for start in range(0, len(tokens_RD), size):
        # Number of each expert's tokens in this chunk.
        counts = F.pad(ends_e.clamp(start, start + size), (1, 0), value=start).diff()
        rows = tokens_RD[start : start + size]
        chunks.append(checkpoint(products, rows, counts, *weights, use_reentrant=False))
    return torch.cat(chunks)


def count(ids_BN: Tensor, num_experts: int) -> Tensor:
    """Count how often each id occurs in each row, (B, E) int64, without waiting for the device as bincount does."""
    counts_BE = ids_BN.new_zeros(len(ids_BN), num_experts)
    return counts_BE.scatter_add_(1, ids_BN, torch.ones_like(ids_BN))


class Spread(torch.autograd.Function):
    """Copies of each token for its K experts, in the given order. Gradients of the copies are added in the order of K."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.k = k
        return x_TD[order_N // k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse_N,) = ctx.saved_tensors
        tokens_TKD = grads[0][inverse_N].unflatten(0, (-1, ctx.k))
        wide = torch.promote_types(tokens_TKD.dtype, torch.float32)
        return tokens_TKD.sum(1, dtype=wide).to(tokens_TKD.dtype), None, None, None
