"""Start collectives now and wait for them later, and build differentiable ones on them.

They are torch's functional collectives, taken at the operators: torch.compile and a simulator see both the start and
the wait, nothing is a tensor subclass that waits at an unknown moment, and the operators are the same in torch 2.11 to
2.15 while the Python functions above them change names and warn. A group goes by its name.

C ranks of the group; the first dimension is the one that is gathered, scattered or exchanged.
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
    """Start to concatenate every rank's x: (C * n, ...) of (n, ...)."""
    # NCCL and gloo send memory in its order, so a view must become contiguous first.
    return _c10d.all_gather_into_tensor(x.contiguous(), size, group)


def start_reduce_scatter(x: Tensor, *, group: str, size: int) -> Tensor:
    """Start to sum x over ranks; each gets its part: (n, ...) of (C * n, ...)."""
    return _c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group)


def start_all_to_all(x: Tensor, *, group: str, to: list[int], from_: list[int]) -> Tensor:
    """Send the first to[0] rows of x to rank 0, the next to[1] to rank 1, ...; get from_[c] rows from rank c."""
    return _c10d.all_to_all_single(x.contiguous(), from_, to, group)


def all_to_all(x: Tensor, *, group: str) -> Tensor:
    """Send row c of x to rank c, and receive row r of its x; x has a row for each rank. Differentiable."""
    return _AllToAll.apply(x, group)


def all_to_all_tokens(x: Tensor, *, group: str, to: list[int], from_: list[int]) -> Tensor:
    """Send and receive any numbers of rows, as `start_all_to_all` does. Differentiable."""
    return AsyncAllToAll(x, group=group, to=to, from_=from_).wait()


class AsyncAllToAll:
    """Start to send and receive rows, as `start_all_to_all` does. Differentiable: what runs before `wait` has its backward pass
    while the gradients of the rows travel back."""

    def __init__(self, x: Tensor, *, group: str, to: list[int], from_: list[int]) -> None:
        self.group, self.to, self.from_ = group, to, from_
        self.gradients: list[Tensor] = []
        self._rows: list[Tensor] = [_SendTokens.apply(x, self)]  # pyright: ignore

    def wait(self) -> Tensor:
        """Return the rows that arrived. To be called once."""
        # Not kept: the graph keeps this object, which would then keep the graph.
        return _ReceiveTokens.apply(self._rows.pop(), self)  # pyright: ignore[reportReturnType]


def all_gather(x: Tensor, *, group: str, size: int) -> Tensor:
    """Return every rank's x, (C, ...) of (...). Differentiable: gradients are summed over ranks, in fp32 at least."""
    return _AllGather.apply(x, group, size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        # A row for each rank.
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
        # Autograd takes the ready node that is the latest of the forward pass: next are those between the two.
        back = start_all_to_all(grads[0], group=rows.group, to=rows.from_, from_=rows.to)
        rows.gradients.append(back)
        # As many rows as arrived, which autograd asks for. Nobody reads it.
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
