"""Round fp32 to bf16 stochastically: up or down with the odds that make it right on average.

A bf16 weight has 8 significant bits, so that an update below a 256th of the weight is lost when rounded to the
nearest, step after step. Rounded up with probability (distance from below) / (distance between neighbours), the
weight moves by the update on average, and needs no fp32 master (arXiv:2010.06192).

The noise is a hash of the run's seed, the parameter's name, the step and the element's place in the whole
parameter. So it is the same on every replica and in every layout, a resumed run draws what an
uninterrupted one does, and no generator's state needs saving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.torch_compat import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class StepNoise:
    """Draw one step's random numbers for a vector that joins pieces of several parameters.

    step: 32 random bits, a scalar int64 on the host, so that compiled code is the same for all steps. table: of the pieces, on the
    device, by `Dice`.
    """

    step: Tensor
    table: tuple[Tensor, ...]

    def sixteen_bits(self, like: Tensor) -> Tensor:
        """Return uniform integers in 0 .. 65535, int32, in the shape of the vector, which may be cut into rows."""
        ends, seeds, *columns = self.table
        index = torch.arange(like.numel(), device=like.device).view(like.shape)
        piece = torch.bucketize(index, ends, right=True)
        keys = _hash32(seeds ^ self.step)  # equal shapes get different noise
        key, first, place, outer, *inner = (column[piece] for column in (keys, *columns))
        # From the index in the vector to that in this rank's shard, and to the place in the whole parameter.
        index = index - first
        for size, stride in zip(inner[::2], inner[1::2], strict=True):
            rest = index // size
            place = place + (index - rest * size) * stride
            index = rest
        return (_hash32((place + index * outer) ^ key) >> 16).int()


class RoundingNoise:
    """Know where this rank's elements are in a whole parameter, and the parameter's seed."""

    def __init__(self, parameter: Tensor, *, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"rounding/{seed}/{name}".encode(), digest_size=4).digest()
        # A key from the parameter's name, so that equal shapes get different noise.
        self.seed = int.from_bytes(digest, "little")
        strides, begin, shape = parameter.stride(), [0] * parameter.ndim, parameter.shape
        if isinstance(parameter, DTensor):
            shape, begin = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
        self.offset = sum(b * s for b, s in zip(begin, strides, strict=True))
        # Sizes and strides, innermost first. Dimensions that follow each other without a gap are one.
        self.dims: list[tuple[int, int]] = [] if shape else [(1, 1)]
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if self.dims and stride == self.dims[-1][0] * self.dims[-1][1]:
                self.dims[-1] = (self.dims[-1][0] * size, self.dims[-1][1])
            else:
                self.dims.append((size, stride))


class Dice:
    """Draw the noise of an optimizer's parameters, step by step. sources: what each of them rounds with; None: to the nearest."""

    def __init__(self, sources: Mapping[Tensor, RoundingNoise] | None) -> None:
        self.sources = sources or {}
        self._tables: dict[Any, tuple[Tensor, ...]] = {}

    def at_step(self, step: float, pieces: Sequence[tuple[Tensor, int, int]]) -> StepNoise | None:
        """Return the noise of a vector of pieces (parameter, begin, length) of shards with equally many `dims`; the same each step."""
        if not self.sources:
            return None
        key = tuple((id(parameter), begin) for parameter, begin, _ in pieces)
        if key not in self._tables:
            self._tables[key] = self._table(pieces)
        return StepNoise(torch.tensor(_hash32(int(step))), self._tables[key])

    def _table(self, pieces: Sequence[tuple[Tensor, int, int]]) -> tuple[Tensor, ...]:
        """Return what StepNoise looks up, on the device: int64 columns with a row for each piece."""
        rows, end = [], 0
        for parameter, begin, length in pieces:
            noise = self.sources[parameter]
            # Where the shard would begin in the vector, of which the piece may be a later part.
            first, end = end - begin, end + length
            inner = [number for dim in noise.dims[:-1] for number in dim]
            rows.append([end, noise.seed, first, noise.offset, noise.dims[-1][1], *inner])
        # One row more, which nobody looks up: a compiler would take a table of one row for another program.
        rows.append([end + 1, *rows[-1][1:]])
        return tuple(torch.tensor(rows).T.contiguous().to(pieces[0][0].device).unbind())


def rounded(value: Tensor, noise: StepNoise | None = None) -> Tensor:
    """Return fp32 values as they are, or stochastically rounded to what bf16 holds."""
    if noise is None:
        return value
    # bf16 keeps the upper 16 of fp32's 32 bits: adding noise to the lower ones carries with the right odds.
    bits = value.view(torch.int32) + noise.sixteen_bits(value)
    # -65536 clears the lower 16 bits. Infinities and nan must not carry into other values.
    return torch.where(value.isfinite(), (bits & -65536).view(torch.float32), value)


def _hash32(x: Any) -> Any:
    """Mix an integer, or a tensor of int64, from 0 .. 2^32 - 1: every bit of the result depends on every bit of x
    ("lowbias32", found by Chris Wellons' search for such functions).

    Multipliers above 2^31 are written less 2^32: the same modulo 2^32, and no product leaves 64 bits.
    """
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - 2**32)):
        x = ((x ^ (x >> shift)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 15)
