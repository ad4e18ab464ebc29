"""Matmuls of 16-bit tensors with results in fp32, if the device can: exact products, added up in fp32.

N tokens, D inputs, E outputs of a layer
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
    """Return whether torch.mm and addmm take `out_dtype` for such tensors. On CUDA they do, for 16 bits.

    Args:
        dtype: dtype of the operands.
        device_type: type of their device, such as "cuda".
    """
    if dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    return compute_capability(device_type) >= (8, 0)


def linear_in_fp32(x: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x times weight^T in fp32, or in the operands' dtype if that is more precise.

    The product of two 16-bit numbers is exact in fp32. Tensor cores, which take 16-bit operands, therefore return the same
    as a matmul of operands cast to fp32, except for the order of the sums. The backward pass is in fp32, since the gradient of the
    result has more than 16 bits.

    Args:
        x: input, (..., D).
        weight_ED: weight of the layer, (E, D).

    Returns:
        The output, (..., E).
    """
    is_exact = x.dtype == weight_ED.dtype and multiplies_into_fp32(x.dtype, x.device.type)
    # DTensor has no rule for a matmul with out_dtype.
    if is_exact and not isinstance(x, DTensor):
        return _LinearIntoFp32.apply(x.flatten(0, -2), weight_ED).unflatten(0, x.shape[:-1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight_ED.to(dtype))


class _LinearIntoFp32(torch.autograd.Function):
    """Linear layer of 16-bit operands with a result in fp32, for which torch has no derivative."""

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
