"""Multiply in float8 with a scale for each block: 128 x 128 of a weight, 1 x 128 of activations and gradients (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2), by torchao.

    output        x in 1 x 128 along its channels,             weight in 128 x 128
    of the input  the output's gradient in 1 x 128,            weight in 128 x 128
    of the weight the output's gradient in 1 x 128 of tokens,  x in 1 x 128 of tokens

All is e4m3. An outlier coarsens 127 values beside it, and no more. cuBLAS has these products for compute capability 9.0, torchao's
Triton kernels for others. Emulated, the same casts are followed by products in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128


class BlockwiseLinear(nn.Linear):
    """A linear layer without bias. product: maps x and weight to the output."""

    product: Callable[[Tensor, Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight)


def convert_to_blockwise(model: nn.Module, names: set[str], *, emulate: bool) -> None:
    """Replace the named layers in place; they keep their weights. Raises ImportError without torchao's kernels, unless emulated."""
    product = _Emulated.apply if emulate else _torchao_product()
    for name in names:
        parent, _, child = name.rpartition(".")
        old: Any = model.get_submodule(name)
        new = BlockwiseLinear(old.in_features, old.out_features, bias=False, device="meta")
        new.weight, new.product = old.weight, product  # pyright: ignore
        model.get_submodule(parent).register_module(child, new)


def _torchao_product() -> Callable[[Tensor, Tensor], Tensor]:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    # cuBLAS multiplies blocks since 12.9, and on this generation alone.
    has_cublas = (
        torch.cuda.get_device_capability() == (9, 0) and (torch.version.cuda or "") >= "12.9"
    )
    # Its products are in bf16, whatever goes in.
    return lambda x, weight: fp8_blockwise_mm.apply(
        x, weight, BLOCK, torch.bfloat16, not has_cublas
    ).to(x.dtype)  # pyright: ignore


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = cast(x.flatten(0, -2), 1, BLOCK) @ cast(weight, BLOCK, BLOCK).T
        return out.unflatten(0, x.shape[:-1]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        of_input = cast(grad, 1, BLOCK) @ cast(weight, BLOCK, BLOCK)
        of_weight = cast(grad, BLOCK, 1).T @ cast(x.flatten(0, -2), BLOCK, 1)
        return of_input.view_as(x).to(x.dtype), of_weight.to(weight.dtype)


def cast(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return, in fp32, what is left of a matrix in float8 with a scale for each block of rows x columns, which must divide it."""
    blocks = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = 448 / blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)
    left = (blocks * scale).to(torch.float8_e4m3fn).float() / scale
    return left.flatten(2).flatten(0, 1)
