"""titan's linear attention in the place of transformers', for every layer that calls one of the functions in `_OURS`.

A layer of transformers with a linear recurrence calls functions of its file between its projections: a short convolution, and the
recurrence. Each takes the keyword arguments of the layer's call. So a hook adds the layer itself to these. Where it is given, titan's
function runs, with the layer's own `LinearAttention`, which context parallelism replaces the borders of. transformers' own models call
their functions as before.

B batch, S sequence, D channels, W kernel size, H heads, K size of a key, V size of a value
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import attention
from .linear_attention import LinearAttention
from .short_convolution import short_convolution

_LAYER = "titan_layer"


def prepare_recurrences(model: nn.Module) -> None:
    """Add titan's linear attention to each layer with a linear recurrence, as its child `recurrence`."""
    for module in list(model.modules()):
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        called = {*code.co_names} if code is not None else set()
        file = sys.modules[type(module).__module__]
        # Functions that have kernels elsewhere.
        kernels = {name for name in called if hasattr(getattr(file, name, None), "__wrapped__")}
        ours = kernels & _OURS.keys()
        if ours == {_CONVOLUTION}:  # alone, or before a recurrence that titan does not have
            ours = set() if kernels - {_CONVOLUTION, "causal_conv1d_update"} else ours
        if not ours:
            continue
        for name in ours:
            _replace(file, name)
        layer = module
        layer.recurrence = LinearAttention(scale=1.0 if _MAMBA in ours else None)
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, _LAYER: module}), with_kwargs=True
        )


def _replace(file: Any, name: str) -> None:
    """Replace a function in a module of transformers by one that calls titan's if it gets the layer."""
    theirs, ours = getattr(file, name), _OURS[name]
    if hasattr(theirs, _LAYER):
        return

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        layer = kwargs.pop(_LAYER, None)
        return theirs(*args, **kwargs) if layer is None else ours(layer, *args, **kwargs)

    setattr(call, _LAYER, True)
    setattr(file, name, call)


def _convolve(
    layer: Any,
    hidden_BDS: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    document_ids_BS: Any = None,
    **others: Any,
) -> Tensor:
    from transformers.activations import ACT2FN

    # A parameter of a module that is not called itself: on tensor-parallel ranks, it is replicated.
    weight_DW, bias_D = (x.to_local() if isinstance(x, DTensor) else x for x in (weight, bias))
    assert weight_DW is not None
    reach = weight_DW.shape[-1] - 1
    attention.record_recurrence(layer, others, documents=document_ids_BS, reach=reach)
    x_BSD, borders = hidden_BDS.transpose(1, 2).to(weight_DW.dtype), layer.recurrence.borders
    out_BSD = short_convolution(
        x_BSD, weight_DW, bias_D, borders, document_ids_BS=document_ids_BS
    )
    if activation is not None:
        out_BSD = ACT2FN[activation](out_BSD)
    return out_BSD.transpose(1, 2).to(hidden_BDS.dtype)


def _delta_rule(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    document_ids_BS: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the delta rule with a gate for each head, (B, S, H), or for each channel, (B, S, H, K)."""
    normed = [x.float() for x in (query, key)]
    if use_qk_l2norm_in_kernel:
        normed = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in normed]
    # The gradient of g[None][0] is contiguous. Softplus, from which the gates come, returns the strides of its input when it is traced, and
    # those of the gradient when it runs (torch 2.11 to 2.13), so that a later view failed in programs of aot_eager.
    tensors = [x.transpose(1, 2) for x in (*normed, value, g[None][0], beta)]
    # Each position corrects, writes and reads a state of H x K x V numbers.
    attention.record_recurrence(
        layer,
        others,
        documents=document_ids_BS,
        flops=6 * tensors[2].shape[1] * key.shape[-1] * value.shape[-1],
    )
    out_BHSV = layer.recurrence(*tensors, document_ids_BS)
    return out_BHSV.transpose(1, 2).to(query.dtype).contiguous(), None


def _mamba(
    layer: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    document_ids_BS: Any = None,
    **others: Any,
) -> Any:
    """Compute state space duality: C, B and dt x are queries, keys and values, and dt A is the gate of each head."""
    heads, size = hidden_states.shape[2:]
    flops = 4 * B.shape[-1] * heads * size
    attention.record_recurrence(layer, others, documents=document_ids_BS, flops=flops)
    dt_BSH = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt_BSH = (F.softplus(dt_BSH) if dt_softplus else dt_BSH).clamp(*dt_limit).float()
    x_BSHV = hidden_states.float()
    values, gates = (x_BSHV * dt_BSH[..., None]).to(hidden_states.dtype), A.float() * dt_BSH
    tensors = [x.transpose(1, 2) for x in (C.float(), B.float(), values, gates)]
    out_BSHV = layer.recurrence(*tensors, None, document_ids_BS).transpose(1, 2)
    out_BSHV = out_BSHV if D is None else out_BSHV + D[..., None] * x_BSHV
    return (out_BSHV.contiguous(), None) if return_final_states else out_BSHV.contiguous()


_CONVOLUTION, _MAMBA = "causal_conv1d_fn", "mamba2_chunk_scan"
_OURS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    _MAMBA: _mamba,
    # Fused from projection to projection, or nothing: then transformers calls the parts.
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
}
