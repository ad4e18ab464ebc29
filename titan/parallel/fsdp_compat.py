"""Private parts of FSDP2 in torch 2.11 to 2.15: its groups of parameters, and repairs of what it does with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TrainingState


def parameter_groups(module: Any) -> list[Any]:
    """Return FSDP's groups of a module's own parameters, if it shards the module. torch 2.11 has one, 2.13 a list."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    return getattr(state, "_fsdp_param_groups", None) or [
        group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None
    ]


def is_sharded(group: Any) -> bool:
    """Return whether several ranks share the parameters of a group."""
    return isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size > 1


def gathers_itself(weight: Any) -> bool:
    """Return whether a weight says how it is gathered, as torchao's weights do, which are gathered in float8."""
    return hasattr(weight, "fsdp_pre_all_gather")


def gathered(group: Any) -> list[Any]:
    """Return the parameters of a group that FSDP has gathered at least once."""
    return [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def after_gathering(module: nn.Module, then: Callable[[], None]) -> None:
    """Call `then` each time FSDP has gathered the module's own parameters. Never, if it does not shard the module."""
    # FSDP waits for its groups in order, so the last one is the end of gathering.
    for group in parameter_groups(module)[-1:]:

        def waited_for(wait: Callable[[], None] = group.wait_for_unshard) -> None:
            wait()
            then()

        group.wait_for_unshard = waited_for


def reduce_unused(module: nn.Module, *, is_uneven: bool = False) -> None:
    """Make FSDP reduce gradients if a micro-batch uses only some of a unit's parameters, or none.

    torch alone fails for a unit that no micro-batch has used yet, and adds up gradients of two precisions. If the last micro-batch
    uses other parameters, it leaves the sum over replicas to the next step, or adds it to other parameters. All ranks must use the
    same parameters, except in a unit that is uneven: experts, to which one rank may send no token. There a missing gradient is zeros.
    """
    ran: set[nn.Module] = set()
    if is_uneven:
        module.register_forward_pre_hook(lambda module, _: ran.add(module))
    for group in parameter_groups(module):
        group.post_backward = partial(_post_backward, group, group.post_backward, set(), ran)


def average_gradients(module: nn.Module, divisor: int) -> None:
    """Make FSDP divide a unit's sums of gradients by a number of ranks, which may be more than share the unit, as for experts.

    torch divides by the ranks that share the unit. By another factor it divides twice if its shards have one rank.
    """
    for group in parameter_groups(module):
        own = group.mesh_info.mesh.size()
        if own != divisor and is_sharded(group):
            group.gradient_divide_factor = float(divisor)
        elif own != divisor:
            group.post_backward = partial(_divide, group, group.post_backward, divisor / own)


@torch.no_grad()
def _divide(group: Any, reduce: Callable[..., None], factor: float, *args: Any) -> None:
    for p in gathered(group) if group.reduce_grads else ():
        p.accumulate_unsharded_grad_if_needed()
        # Not in place: two gradients may be views of one sum.
        if p.unsharded_accumulated_grad is not None:
            p.unsharded_accumulated_grad = p.unsharded_accumulated_grad / factor
        elif p._unsharded_param.grad is not None:
            p._unsharded_param.grad = p._unsharded_param.grad / factor
    reduce(*args)


def refuse_graph(module: nn.Module) -> None:
    """Make a backward pass that builds a graph raise ValueError: FSDP would give the outer pass wrong gradients."""

    def refuse(backward: Callable[..., Any], *args: Any) -> Any:
        # Only create_graph turns gradients on in a backward pass.
        if torch.is_grad_enabled() and not detect_fake_mode():
            raise ValueError(
                "create_graph=True, as for a gradient penalty: FSDP and DDP free or reduce in the inner backward pass what the outer one "
                "needs; use torch's DistributedDataParallel"
            )
        return backward(*args)

    for group in parameter_groups(module):
        group.pre_backward = partial(refuse, group.pre_backward)


def _post_backward(
    group: Any, reduce: Callable[..., None], used: set[Any], ran: set[nn.Module], *args: Any
) -> None:
    parameters = gathered(group)
    if not parameters:
        return  # never gathered
    grads = {
        p: p._unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None
        for p in parameters
    }
    used |= {p for p in parameters if grads[p]}
    # Replicas add up one vector of a unit, so each micro-batch must have gradients of the same parameters in it.
    waits = group._partial_reduce_output is not None
    replicates = isinstance(group.mesh_info, DDPMeshInfo)
    is_whole = replicates and group.reduce_grads and (waits or not group.all_reduce_grads)
    is_whole = is_whole and (any(grads.values()) or group.all_reduce_grads)
    if ran and group.reduce_grads:
        is_whole, used = True, {*used, *parameters}
        ran.clear()
    filled = [
        p for p in parameters if is_whole and p.sharded_param.requires_grad and not grads[p]
    ]
    if filled or any(p.unsharded_accumulated_grad is not None for p in parameters):
        for p in parameters:
            p.accumulate_unsharded_grad_if_needed()
            p.to_accumulated_grad_if_needed()
    for p in filled:
        dtype = p.reduce_dtype or p._unsharded_param.dtype
        p.unsharded_accumulated_grad = torch.zeros_like(
            p._unsharded_param, dtype=dtype, requires_grad=False
        )
    without = [p for p in filled if p.sharded_param.grad is None]
    reduce(*args)
    if group.reduce_grads and group.all_reduce_grads:
        for p in without:
            # No micro-batch used the parameter. With a gradient of zeros, an optimizer would decay the weight.
            if p not in used:
                p.sharded_param.grad = None
        used.clear()
