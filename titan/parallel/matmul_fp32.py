"""Multiply matrices of 16 bits into fp32, where the device can: the exact products of the inputs, added up in fp32.

N rows, D inputs, E outputs of a layer
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .torch_compat import compute_capability


@torch.compiler.assume_constant_result
def multiplies_into_fp32(dtype: torch.dtype, device_type: str) -> bool:
    """Return whether torch.mm and addmm of such tensors take `out_dtype`: CUDA's do, for 16 bits."""
    if dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    return compute_capability(device_type) >= (8, 0)


def linear_in_fp32(x: Tensor, weight_ED: Tensor, *, into_fp32: bool = True) -> Tensor:
    """Return x (..., D) times weight^T, (..., E), in fp32 or better.

    A product of two numbers of 16 bits is exact in fp32, so tensor cores, which take them as they are, give what a product of
    inputs in fp32 gives, except for the order of sums. The backward pass is in fp32: the gradient of the result has more bits.

    Args:
        into_fp32: allow such a product. It is one autograd.Function, which computes both gradients at once.
    """
    is_exact = x.dtype == weight_ED.dtype and multiplies_into_fp32(x.dtype, x.device.type)
    # DTensor has no rule for such a product.
    if into_fp32 and is_exact and not isinstance(x, DTensor):
        return _LinearIntoFp32.apply(x.flatten(0, -2), weight_ED).unflatten(0, x.shape[:-1])  # pyright: ignore
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight_ED.to(dtype))


class _LinearIntoFp32(torch.autograd.Function):
    """torch has no derivative of such a product."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        return torch.mm(x_ND, weight_ED.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, weight_ED = ctx.saved_tensors
        (d_y_NE,) = grads
        d_x_ND = torch.mm(d_y_NE, weight_ED.to(d_y_NE.dtype)).to(x_ND.dtype)
        return d_x_ND, torch.mm(d_y_NE.T, x_ND.to(d_y_NE.dtype)).to(weight_ED.dtype)
