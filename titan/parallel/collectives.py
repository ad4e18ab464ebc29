"""Collectives that start now and are waited for later, and differentiable collectives built on them.

They call the operators of torch's functional collectives. torch.compile and a simulator see both the start and the wait, and no
tensor subclass waits at an unknown moment. The operators are the same in torch 2.11 to 2.15, while the Python functions
around them change their names and warn. A group is given by its name.

C ranks of the group. The first dimension is the one that a collective gathers, scatters or sends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor
from torch.autograd.function import once_differentiable

_c10d = torch.ops._c10d_functional


# Results of `start_...` hold no valid numbers until `wait`.
wait = _c10d.wait_tensor


def start_all_gather(x: Tensor, *, group: str, size: int) -> Tensor:
    """Start to concatenate x of all ranks: (n, ...) -> (C * n, ...).

    Args:
        x: this rank's tensor, (n, ...).
        group: name of the process group.
        size: number of its ranks, C.

    Returns:
        The tensor (C * n, ...), valid after `wait`.
    """
    # NCCL and gloo send memory in its order, so a view must become contiguous first.
    return _c10d.all_gather_into_tensor(x.contiguous(), size, group)


def start_reduce_scatter(x: Tensor, *, group: str, size: int) -> Tensor:
    """Start to sum x over ranks and to give each rank its part: (C * n, ...) -> (n, ...).

    Args:
        x: this rank's tensor, (C * n, ...).
        group: name of the process group.
        size: number of its ranks, C.

    Returns:
        This rank's part of the sum, (n, ...), valid after `wait`.
    """
    return _c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group)


def start_all_to_all(x: Tensor, *, group: str, to: list[int], from_: list[int]) -> Tensor:
    """Start to send each rank its part of x: the first to[0] entries to rank 0, the next to[1] to rank 1, and so on.

    Args:
        x: this rank's entries along the first dimension, sorted by receiver.
        group: name of the process group.
        to: number of entries for each rank.
        from_: number of entries from each rank.

    Returns:
        The entries that arrive, sorted by sender, valid after `wait`.
    """
    return _c10d.all_to_all_single(x.contiguous(), from_, to, group)


def all_to_all(x: Tensor, *, group: str) -> Tensor:
    """Send x[c] to rank c, and receive an entry from every rank. Differentiable.

    Args:
        x: an entry for each rank, (C, ...).
        group: name of the process group.

    Returns:
        The entries from the ranks, in order of rank, (C, ...).
    """
    return _AllToAll.apply(x, group)


class AsyncAllToAll:
    """All-to-all of tokens that is under way from the construction on. Differentiable.

    An operation between the construction and `wait` overlaps with the transfer. Its backward pass overlaps with the transfer of the
    tokens' gradients back.
    """

    def __init__(self, x: Tensor, *, group: str, to: list[int], from_: list[int]) -> None:
        self.group, self.to, self.from_ = group, to, from_
        self.gradients: list[Tensor] = []
        self._rows: list[Tensor] = [_SendTokens.apply(x, self)]

    def wait(self) -> Tensor:
        """Return the tokens that arrived. Call it once."""
        # Remove it from the list: the graph keeps this object, which would then keep the graph.
        return _ReceiveTokens.apply(self._rows.pop(), self)


def all_gather(x: Tensor, *, group: str, size: int) -> Tensor:
    """Return x of all ranks: (...) -> (C, ...). Differentiable.

    The gradients are summed over ranks in fp32, or in the gradient's own dtype if that is more precise.

    Args:
        x: this rank's tensor, of any shape.
        group: name of the process group.
        size: number of its ranks, C.
    """
    return _AllGather.apply(x, group, size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        # An entry for each rank.
        ones = [1] * x.shape[0]
        return wait(start_all_to_all(x, group=group, to=ones, from_=ones))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The transpose of an all-to-all is an all-to-all.
        return all_to_all(grads[0], group=ctx.group), None


class _SendTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: AsyncAllToAll) -> Tensor:
        ctx.rows = rows
        return start_all_to_all(x, group=rows.group, to=rows.to, from_=rows.from_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return wait(ctx.rows.gradients.pop()), None


class _ReceiveTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, rows: AsyncAllToAll) -> Tensor:
        ctx.rows = rows
        return wait(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        # Autograd runs the ready node that came last in the forward pass: next run the nodes between start and wait.
        back = start_all_to_all(grads[0], group=rows.group, to=rows.from_, from_=rows.to)
        rows.gradients.append(back)
        # Autograd asks for a gradient of the shape of the tokens that arrived. Nobody reads it.
        return grads[0], None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return wait(start_all_gather(x[None], group=group, size=size))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dtype = grads[0].dtype
        # A sum over many ranks in bf16 would lose bits that one process keeps.
        precise = grads[0].to(torch.promote_types(dtype, torch.float32))
        mine = wait(start_reduce_scatter(precise, group=ctx.group, size=ctx.size))
        return mine[0].to(dtype), None, None
