"""What a mixture of experts and its exchange both do with rows: reorder them, and read how many there are.

Torch alone, so that models and helpers may import it. N, R rows; D model
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_counts(counts: Tensor, *, num_tokens: int) -> list[int]:
    """Return integers of the device on the host, which waits for them.

    Args:
        num_tokens: that this rank holds. The simulator, which has no counts, deals them out evenly.
    """
    return counts.tolist()


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
    """Return the rows in an order; inverse_N is its inverse. The gradient is a look-up too, not a sum into places."""
    return _Permute.apply(tokens_ND, order_N, inverse_N)
