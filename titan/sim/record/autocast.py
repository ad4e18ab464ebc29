"""torch.autocast on the fake device: the casts that torch makes on a GPU.

torch registers them for each of its devices in C++, and for a device that is made in Python it registers nothing. The lists are those of
ATen/autocast_mode.h, without what language models do not call (images, distances, recurrent networks). Example: a linear layer in fp32

    with torch.autocast("sim", dtype=torch.bfloat16):
        y = F.linear(x, weight)     # casts x and the weight to bf16, then multiplies
        z = F.softmax(y, dim=-1)    # has a result in fp32

One thing differs: torch casts a parameter once for all its uses in a region, and here each use casts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from titan.sim.record.torch_compat import find

_KEY = "AutocastPrivateUse1"
_LOWER = [
    "linear",
    "matmul",
    "mm",
    "mv",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "convolution",
    "scaled_dot_product_attention",
]
"""Operators whose inputs are cast to the dtype of the region."""
_FP32 = [
    "exp",
    "log",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "nll_loss",
    "kl_div",
    "mse_loss",
    "l1_loss",
    "binary_cross_entropy_with_logits",
    "logsumexp",
]
"""Operators whose inputs are cast to fp32."""
_FP32_RESULT = [
    "softmax.int",
    "log_softmax.int",
    "sum",
    "sum.dim_IntList",
    "cumsum",
]
"""Operators that get fp32 as the dtype of their result."""


def declare(kernels: Any, fallbacks: Any, device_type: str) -> None:
    """Declare the casts of a device.

    Args:
        kernels: library of aten's kernels.
        fallbacks: library of the namespace "_". All other operators run as they are.
        device_type: device type, as torch.autocast takes it.
    """
    fallbacks.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, call in (
        (_LOWER, _with_inputs),
        (_FP32, _with_inputs),
        (_FP32_RESULT, _to_fp32),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            dtype = None if names is _LOWER else torch.float32
            kernels.impl(name, partial(_outside, call, op, device_type, dtype), _KEY)


def _outside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a call, so that what it calls is not cast again."""
    key = getattr(find("torch._C", "DispatchKey"), _KEY)
    keys = find("torch._C", "DispatchKeySet")(key)
    with find("torch._C", "_ExcludeDispatchKeyGuard")(keys):
        return call(*args, **kwargs)


def _with_inputs(
    op: Any, device_type: str, dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> Any:
    """Call an operator with inputs of a dtype. None: that of the region."""
    dtype = dtype or torch.get_autocast_dtype(device_type)

    def cast(value: Any) -> Any:
        return value.to(dtype) if _is_eligible(value, device_type) else value

    return op(*tree_map(cast, args), **tree_map(cast, kwargs))


def _to_fp32(op: Any, device_type: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call an operator, and ask for a result of a dtype."""
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    x = named.pop(names[0])
    if _is_eligible(x, device_type) and named.get("dtype") is None:
        named["dtype"] = dtype
    return op(x, **named)


def _is_eligible(value: Any, device_type: str) -> bool:
    """Return whether a value is a tensor of floating point numbers on the device, but not in fp64."""
    is_here = isinstance(value, Tensor) and value.device.type == device_type
    return is_here and value.is_floating_point() and value.dtype != torch.float64
