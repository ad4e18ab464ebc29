"""Grouped matmuls of experts in 8 bits, by torchao: float8 with a scale for each row, or MXFP8.

Weights do not change: torchao's functions take them as they are, and no tensor wrapper of torchao gets into a checkpoint. The
kernels want groups of a multiple of 16 tokens (MXFP8: 32), so each expert's group is padded with zeros, which are removed again.

An example with float8: 3 experts get 5, 0 and 20 tokens. They are padded to 16, 0 and 32 tokens.

Emulated float8 makes the same casts, followed by matmuls in high precision, on any device. torchao emulates MXFP8, but not this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .float8 import Float8Error
from .module_kinds import GroupedExperts, modules_of
from .token_order import host_counts

_MULTIPLE = {"float8": 16, "mxfp8": 32}


def apply_grouped_float8(
    model: nn.Module, *, recipe: str, fqns: Sequence[str], emulate: bool = False
) -> list[str]:
    """Convert the experts whose names contain one of `fqns`, in place. Call it after `apply_ep`.

    Args:
        model: the model.
        recipe: "float8" or "mxfp8".
        fqns: parts of names.
        emulate: compute in high precision, with rounded values.

    Returns:
        The names of the converted experts.

    Raises:
        Float8Error: no experts have such a name, the width or the input of an expert does not divide by 16 (MXFP8: 32), or torchao is missing.
    """
    multiple, names = _MULTIPLE[recipe], []
    product = _grouped_mm(recipe, emulate=emulate)
    experts = modules_of(model, GroupedExperts)
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
    if not names:
        raise Float8Error(
            f"grouped {recipe} found no experts (modules with `grouped_dtypes`) in {type(model).__name__} whose names contain "
            f"{' or '.join(fqns)}; it has {', '.join(experts) or 'none'}"
        )
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
    """Return a function's result for tokens that are padded to whole multiples for each expert."""
    padded_e = (counts_e + multiple - 1) // multiple * multiple
    shift_e = (padded_e.cumsum(0) - padded_e) - (counts_e.cumsum(0) - counts_e)
    places_R = torch.arange(len(tokens_RD), device=tokens_RD.device)
    places_R = places_R + shift_e.repeat_interleave(counts_e, output_size=len(tokens_RD))
    # The largest number of tokens that may be needed: only the device knows the number.
    most = -(-(len(tokens_RD) + len(counts_e) * (multiple - 1)) // multiple) * multiple
    padded = tokens_RD.new_zeros(most, tokens_RD.shape[1]).index_copy(0, places_R, tokens_RD)
    return function(padded, padded_e, *weights, product=product, **options)[places_R]


def _grouped_mm(recipe: str, *, emulate: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a differentiable matmul of tokens (R, I) with each group's matrix (e, I, O)."""
    try:
        if recipe == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import (
                _to_mxfp8_then_scaled_grouped_mm,
            )
            from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

            kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
            product = partial(_to_mxfp8_then_scaled_grouped_mm, kernel_preference=kernels)
            # Its results are in bf16, for inputs of any dtype.
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
    return partial(
        _to_fp8_rowwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False
    )


class _EmulatedFloat8(torch.autograd.Function):
    """Matmuls of tokens and gradients that were cast to float8 and back, group by group.

    The values that share a scale lie along the inner dimension of a matmul, so each of the three matmuls casts its operands itself.
    """

    @staticmethod
    def forward(ctx: Any, tokens_RI: Tensor, weights_eIO: Tensor, ends_e: Tensor) -> Tensor:
        sizes = host_counts(F.pad(ends_e, (1, 0)).diff(), num_tokens=len(tokens_RI))
        # Tokens behind the last group belong to no expert.
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
    """Return x rounded to float8 (e4m3), with a power of two as the scale of all values along `dim`."""
    if not x.numel():
        return x
    largest = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)
