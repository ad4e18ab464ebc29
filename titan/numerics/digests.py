"""Digests of tensors: projections on fixed vectors of signs, which the parts of a tensor add up to.

P projections, C chunks of the first dimension
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PROJECTIONS, CHUNKS = 4, 8
_AT_ONCE = 2**24  # values of which copies in a wide dtype are made


@dataclass
class Digest:
    """Digest of a tensor, or of the part of it that one rank has.

    Attributes:
        sums: projections of each chunk of the first dimension, (P, C), float64 on the CPU.
        squares: sum of squares. None: the parts are yet to be added up, so the sum of their squares says nothing.
        dtype: dtype of the tensor.
    """

    sums: Tensor
    squares: float | None
    dtype: str

    def __add__(self, other: Digest) -> Digest:
        """Return the digest of two parts of the same tensor."""
        sums, squares = self.sums + other.sums, None
        if self.squares is not None and other.squares is not None:
            squares = self.squares + other.squares
        return replace(self, sums=sums, squares=squares)


def digest_of(
    local: Tensor,
    indices: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    is_partial: bool = False,
) -> Digest:
    """Return the digest of a rank's part of a tensor.

    Args:
        local: the part.
        indices: its indices in the whole tensor, for each dimension.
        lengths: lengths of the whole tensor's dimensions.
        is_partial: whether parts with the same indices are to be added up.
    """
    if local.numel() > _AT_ONCE:
        dim = max(range(local.ndim), key=lambda d: local.shape[d])
        halves = zip(local.tensor_split(2, dim), indices[dim].tensor_split(2), strict=True)
        first, second = (
            digest_of(
                half, [*indices[:dim], own, *indices[dim + 1 :]], lengths, is_partial=is_partial
            )
            for half, own in halves
        )
        return first + second
    dtype = str(local.dtype).removeprefix("torch.")
    wide = torch.float32 if local.dtype.itemsize < 4 else torch.float64
    x = local.detach().to(wide)
    squares = (
        None if is_partial else torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
    )
    if not x.ndim:
        sums = torch.zeros(PROJECTIONS, CHUNKS, dtype=torch.float64)
        sums[:, 0] = x.item()
        return Digest(sums, squares, dtype)
    projected = x.unsqueeze(-1)
    for place in reversed(range(1, x.ndim)):
        signs = _signs(indices[place], place).to(x)
        projected = x @ signs if place == x.ndim - 1 else (projected * signs).sum(-2)
    if x.ndim == 1:
        projected = projected.expand(-1, PROJECTIONS)
    projected = (projected * _signs(indices[0], 0).to(x)).double()
    chunks = (indices[0] * CHUNKS // max(1, lengths[0])).to(x.device)
    sums = projected.new_zeros(CHUNKS, PROJECTIONS).index_add_(0, chunks, projected)
    return Digest(sums.T.cpu(), squares, dtype)


def _signs(indices: Tensor, place: int) -> Tensor:
    """Return the signs of indices of a dimension, (len, P): bits of a mixed number."""
    # No small multiple of one factor is one of the other: a sign of two dimensions must not be one draw.
    seeds = (
        torch.arange(PROJECTIONS) * 0x3C6EF372FE94F82A
        + torch.tensor(place) * 0x2545F4914F6CDD1D
    )
    return ((mixed(indices[:, None] + seeds) >> 31) & 1) * 2 - 1


def mixed(x: Tensor) -> Tensor:
    """Return mixed numbers (splitmix64)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15


def indices_of(value: Tensor) -> list[Tensor]:
    """Return the indices of this rank's part of a parameter, for each dimension."""
    indices = [torch.arange(n) for n in value.shape]
    if not isinstance(value, DTensor):
        return indices
    mesh = value.device_mesh
    for dim in range(value.ndim):
        # By attribute: torch 2.13's strided shard is no Shard.
        axes = [n for n, p in enumerate(value.placements) if getattr(p, "dim", None) == dim]
        # FSDP shards what tensor parallelism has sharded, though its axis comes first.
        if any(hasattr(value.placements[n], "split_factor") for n in axes):
            axes.reverse()
        for n in axes:
            parts, rank = indices[dim].chunk(mesh.size(n)), mesh.get_local_rank(n)
            indices[dim] = parts[rank] if rank < len(parts) else indices[dim][:0]
    return indices


def whole(tensor: Tensor) -> Tensor:
    """Gather a copy of a tensor that may be sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
