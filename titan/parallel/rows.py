"""What a mixture of experts and its exchange both do with rows: reorder them, and read how many there are.

Torch alone, so that models and helpers may import it. N, R rows; D model
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_counts(counts: Tensor, *, num_rows: int) -> list[int]:
    """Return integers of the device on the host, which waits for them.

    Args:
        num_rows: that this rank holds. The simulator, which has no counts, deals them out evenly.
    """
    return counts.tolist()


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N, place_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        order_N, place_N = ctx.saved_tensors
        return permute(grads[0], place_N, order_N), None, None


def permute(rows_ND: Tensor, order_N: Tensor, place_N: Tensor) -> Tensor:
    """Return the rows in an order; place_N is its inverse. The gradient is a look-up too, not a sum into places."""
    return _Permute.apply(rows_ND, order_N, place_N)
