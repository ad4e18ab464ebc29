"""FSDP2 units of one rank: weights and gradients are cast once each, where they are computed with.

For 16-bit computation with fp32 weights torch moves 24 bytes for each parameter of such a unit in a step: it casts a weight into a
temporary (6 bytes) and copies that (4), and "reduces" a gradient by copying it to the input of a reduction (6) and from there, on
another stream, to the output (8). The allocator keeps that memory for that stream, so no activation can use it afterwards. Here a weight is cast
into FSDP's own buffer (6), and a gradient into its fp32 result (6) on the stream of the backward pass. All bits are equal, and hooks,
DTensors, checkpoints and the accumulation over micro-batches stay FSDP's.

A unit has one rank if a job has one, in a pipeline of one rank a stage, and for experts that no other rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .fsdp_compat import TrainingState, gathers_itself, parameter_groups


def stay_on_rank(module: nn.Module) -> None:
    """Make the FSDP unit of a module, over a mesh of one rank, copy nothing that it need not.

    Args:
        module: module after `fully_shard` over a mesh of size 1. Offloaded weights, and weights that are gathered in 8 bits, keep
            torch's way, as does a unit whose reduction has a factor or a hook.
    """
    for group in parameter_groups(module):
        parameters = group.fsdp_params
        if not any(
            p.offload_to_cpu or gathers_itself(p._sharded_local_tensor) for p in parameters
        ):
            group.wait_for_unshard = partial(_cast_weights, group, group.wait_for_unshard)
            group.post_backward = partial(_keep_gradients, group, group.post_backward)


def _cast_weights(group: Any, wait: Callable[[], None]) -> None:
    if not group._all_gather_result or group.is_sharded_post_forward:
        wait()
        return
    # Frees what another unit gathered, as torch's wait does.
    if group._training_state == TrainingState.FORWARD and group.comm_ctx.all_gather_state:
        group._wait_all_gather_streams_on_event(group.comm_ctx.all_gather_state.event)
        group.comm_ctx.all_gather_state = None
    weights, casts = [], []
    for p in group.fsdp_params:
        weight = p._sharded_param_data
        dtype = p.param_dtype or weight.dtype
        p.init_all_gather_outputs([weight.numel()], [dtype], 1, weight.device)
        p.alloc_all_gather_outputs()
        weights.append(weight)
        casts.append(p.all_gather_outputs[0])
    # The backward pass saved these buffers, and finds the same values in them after the weights were freed in between.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(casts)):
        torch._foreach_copy_(casts, weights)
    for p in group.fsdp_params:
        p.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None


@torch.no_grad()
def _keep_gradients(group: Any, reduce: Callable[..., None], *args: Any) -> None:
    is_plain = group.gradient_divide_factor in (None, 1.0) and group._all_reduce_hook is None
    if group.reduce_grads and is_plain:
        complete = [
            (p, grad) for p in group.fsdp_params if (grad := _take_gradient(p)) is not None
        ]
        narrow = [(p, grad) for p, grad in complete if grad.dtype != p.orig_dtype]
        wide = [torch.empty(g.shape, dtype=p.orig_dtype, device=g.device) for p, g in narrow]
        if narrow:
            torch._foreach_copy_(wide, [grad for _, grad in narrow])
        casts = dict(zip((p for p, _ in narrow), wide, strict=True))
        taken: set[int] = set()
        for p, grad in complete:
            grad = casts.get(p, grad).contiguous()
            # Two gradients may be views of one sum, and one may be a part of more. Fake tensors have no addresses.
            memory = grad.untyped_storage()
            if memory.nbytes() > grad.nbytes or memory._cdata in taken:
                grad = grad.clone()
            taken.add(grad.untyped_storage()._cdata)
            _add_to_shard(p, grad)
    # It finds no gradient that is left to reduce.
    reduce(*args)


def _take_gradient(parameter: Any) -> Tensor | None:
    """Take a parameter's gradient, summed over micro-batches, from the parameter, and return it as precise as its reduction would be."""
    grad, dtype = _take_sum(parameter), parameter.reduce_dtype
    if grad is None or dtype is None or dtype.itemsize > grad.element_size():
        return grad
    return grad.to(dtype)


def _take_sum(parameter: Any) -> Tensor | None:
    if not hasattr(parameter, "_unsharded_param"):
        return None  # never gathered
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is not None:
        grad = parameter.unsharded_accumulated_grad_data
        parameter.unsharded_accumulated_grad = None
        return grad
    if parameter.unsharded_param.grad is None:
        return None
    grad = parameter.unsharded_grad_data
    parameter.unsharded_param.grad = None
    return grad


def _add_to_shard(parameter: Any, grad: Tensor) -> None:
    sharded = parameter.sharded_param
    if sharded.grad is None:
        sharded.grad = parameter.to_sharded_dtensor(grad)
    else:
        sharded.grad._local_tensor += grad
    for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(sharded)
