"""Gradient clipping by the global norm, for plain tensors and DTensors in any mix.

A gradient's squared norm is the sum over its shards: each rank sums its own shards' squares, and one all-reduce
for each set of mesh axes over which gradients are sharded adds them up. Replicated gradients count once. A missing gradient counts 0,
as that of experts without tokens on one rank: which all-reduces run depends on the parameters, which are the same on all ranks.
(torch.nn.utils.clip_grad_norm_ takes gradients of one kind and one mesh only.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .fused_adam import FusedAdam

_SMALL = 2**16  # elements


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    *,
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
    optimizer: FusedAdam | None = None,
) -> Tensor:
    """Scale all gradients in place so that their global L2 norm is at most `max_norm`.

    Check the norm before the optimizer's step. A NaN norm makes all gradients NaN. An infinite norm makes them 0, and NaN
    where they were infinite.

    Args:
        parameters: parameters, some of which may have no gradient.
        max_norm: largest norm. 0 scales nothing.
        stages: pipeline ranks, which have different parameters. A rank without gradients (frozen) adds 0.
        optimizer: optimizer that scales the gradients in its next step. They stay as they are until then.

    Returns:
        The norm before scaling: an fp32 scalar on the gradients' device, the same on every rank of their meshes. Nothing is
        copied to the host.

    Raises:
        ValueError: `max_norm` is negative.
    """
    if max_norm < 0:
        raise ValueError(f"max_norm is {max_norm}: must be positive, or 0 for no clipping")
    parameters = list(parameters)
    trained = trained_by_groups(parameters)
    grads = {groups: local_gradients(of_groups) for groups, of_groups in trained.items()}
    squares = {
        groups: local_sum_of_squares(grads[groups], device=of_groups[0].device)
        for groups, of_groups in trained.items()
    }
    # A stage without trained parameters takes part in the all-reduce below with a 0.
    if stages is not None and not squares:
        squares[()] = torch.zeros((), device=parameters[0].device)
    square = reduce_squares(squares)
    # Stages hold different parameters, so their squares add up.
    if stages is not None:
        dist.all_reduce(square, group=stages)
    norm = square.sqrt()
    # 1e-6 as in torch, against a division by 0. A clamp in place of an `if` keeps the decision on the device.
    if optimizer is not None:
        optimizer.divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm else None
        return norm
    if not max_norm:
        return norm
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for of_groups in filter(None, grads.values()):
        torch._foreach_mul_(of_groups, scale)
    return norm


def reduce_squares(local_by_groups: dict[tuple[dist.ProcessGroup, ...], Tensor]) -> Tensor:
    """Return the global sum of squares.

    Args:
        local_by_groups: local sums, by the process groups over which each must be summed.
    """
    assert local_by_groups, "no parameter is trained"
    for groups, square in local_by_groups.items():
        for group in groups:
            dist.all_reduce(square, group=group)
    return torch.stack(list(local_by_groups.values())).sum()


def local_sum_of_squares(grads: list[Tensor], *, device: torch.device | None = None) -> Tensor:
    """Return the sum of squares of this rank's shards, in fp32. Without any, it is 0 on `device`."""
    if not grads:
        return torch.zeros((), device=device)
    if grads[0].device.type == "cpu":
        # torch's norm kernel on a CPU adds elements one by one: off by 1e-5 at a million elements. sum() adds pairwise. Small
        # gradients are joined, since in a small model a call costs more than its work.
        small = [grad.reshape(-1) for grad in grads if grad.numel() < _SMALL]
        rest = [grad for grad in grads if grad.numel() >= _SMALL]
        parts = [torch.cat(small), *rest] if small else rest
        return torch.stack([part.float().square().sum() for part in parts]).sum()
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()


def trained_by_groups(
    parameters: Iterable[Tensor],
) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
    """Return the trained parameters by the groups over which each is sharded, with a gradient or without."""
    found: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad or parameter.grad is not None:
            found[sharding_groups(parameter)].append(parameter)
    return found


def sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return one group for each axis that shards a parameter. The sum over all these axes is the sum over its shards."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, places = parameter.device_mesh, enumerate(parameter.placements)
    return tuple(
        mesh.get_group(axis) for axis, place in places if not isinstance(place, Replicate)
    )


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards of the gradients that exist."""
    return [local_gradient(p) for p in parameters if p.grad is not None]


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, laid out like the parameter."""
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if grad.placements != parameter.placements:
        # Tensor parallelism leaves some gradients as partial sums.
        grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
    return grad.to_local()
