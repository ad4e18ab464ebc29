"""Compute the experts' grouped products in 8 bits: float8 with a scale for each row, or MXFP8, by torchao.

Weights stay as they are: torchao's functions take them, and none of its tensor wrappers gets into a checkpoint. The kernels
want groups of 16 rows (MXFP8: 32), so rows of zeros fill each expert's group up, and are cut off again.

Emulated float8 follows the same casts by products in high precision, on any device. torchao emulates MXFP8, and not this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .float8 import Float8Error
from .token_order import host_counts

_MULTIPLE = {"float8": 16, "mxfp8": 32}


def apply_grouped_float8(
    model: nn.Module, *, recipe: str, fqns: Sequence[str], emulate: bool = False
) -> list[str]:
    """Convert the experts whose names contain one of `fqns`, in place; return their names. After `apply_ep`.

    Args:
        recipe: "float8" or "mxfp8".

    Raises Float8Error for experts whose width or input does not divide by 16 (MXFP8: 32).
    """
    multiple, names = _MULTIPLE[recipe], []
    product = _grouped_mm(recipe, emulate=emulate)
    experts: dict[str, Any] = {
        n: m for n, m in model.named_modules() if hasattr(m, "grouped_dtypes")
    }
    for name, module in experts.items():
        if not any(part in name for part in fqns):
            continue
        if any(size % multiple for size in module.w1.shape[1:]):
            sizes = " x ".join(map(str, module.w1.shape[1:]))
            raise Float8Error(f"{name}: experts of {sizes} do not divide by {multiple}")
        module.grouped = partial(
            _padded_matmuls, function=module.grouped, product=product, multiple=multiple
        )
        module.grouped_dtypes = (torch.bfloat16, torch.float32)
        names.append(name)
    return names


def _padded_matmuls(
    tokens_RD: Tensor,
    counts_e: Tensor,
    *weights: Tensor,
    function: Callable[..., Tensor],
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    multiple: int,
    **options: Any,
) -> Tensor:
    """Return the function of rows that are padded to whole multiples for each expert."""
    padded_e = (counts_e + multiple - 1) // multiple * multiple
    shift_e = (padded_e.cumsum(0) - padded_e) - (counts_e.cumsum(0) - counts_e)
    places_R = torch.arange(len(tokens_RD), device=tokens_RD.device)
    places_R = places_R + shift_e.repeat_interleave(counts_e, output_size=len(tokens_RD))
    # As many rows as could be needed: how many are is known on the device alone.
    most = -(-(len(tokens_RD) + len(counts_e) * (multiple - 1)) // multiple) * multiple
    padded = tokens_RD.new_zeros(most, tokens_RD.shape[1]).index_copy(0, places_R, tokens_RD)
    return function(padded, padded_e, *weights, product=product, **options)[places_R]


def _grouped_mm(recipe: str, *, emulate: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a product of rows (R, I) with each group's matrix (e, I, O), differentiable."""
    try:
        if recipe == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import (
                _to_mxfp8_then_scaled_grouped_mm,
            )
            from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

            kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
            product = partial(_to_mxfp8_then_scaled_grouped_mm, kernel_preference=kernels)
            # Its products are in bf16, whatever goes in.
            return lambda rows, weights, ends: product(rows, weights, ends).to(rows.dtype)
        if emulate:
            return _EmulatedFloat8.apply
        from torchao.prototype.moe_training.fp8_grouped_mm import (
            _to_fp8_rowwise_then_scaled_grouped_mm,
        )
    except ImportError as error:
        raise Float8Error(
            f"grouped {recipe} needs torchao 0.18 or later ({error}): pip install 'titan-pretrain[float8]'"
        ) from error
    return partial(_to_fp8_rowwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False)


class _EmulatedFloat8(torch.autograd.Function):
    """Products of rows and gradients that were cast to float8 and back, group by group.

    What shares a scale lies along the inner side of a product, so each of the three casts its operands by itself.
    """

    @staticmethod
    def forward(ctx: Any, tokens_RI: Tensor, weights_eIO: Tensor, ends_e: Tensor) -> Tensor:
        sizes = host_counts(F.pad(ends_e, (1, 0)).diff(), num_tokens=len(tokens_RI))
        # Rows behind the last group belong to none.
        ctx.sizes = [*sizes, len(tokens_RI) - sum(sizes)]
        ctx.save_for_backward(tokens_RI, weights_eIO)
        return _by_group(_cast(tokens_RI, 1), _cast(weights_eIO, 1), ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens_RI, weights_eIO = ctx.saved_tensors
        grad_RO = grads[0]
        grad_rows = _by_group(_cast(grad_RO, 1), _cast(weights_eIO, 2).mT, ctx.sizes)
        pairs = zip(tokens_RI.split(ctx.sizes)[:-1], grad_RO.split(ctx.sizes)[:-1], strict=True)
        grad_weights = torch.stack([_cast(x, 0).T @ _cast(g, 0) for x, g in pairs])
        return grad_rows, grad_weights, None


def _by_group(tokens_RI: Tensor, weights_eIO: Tensor, sizes: Sequence[int]) -> Tensor:
    *groups, rest = tokens_RI.split(sizes)
    products = [rows @ matrix for rows, matrix in zip(groups, weights_eIO, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights_eIO.shape[-1])])


def _cast(x: Tensor, dim: int) -> Tensor:
    """Return what is left of x in float8 (e4m3), with a power of two as the scale of all that lies along `dim`."""
    if not x.numel():
        return x
    largest = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)
