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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.torch_compat import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class StepNoise:
    """Hold one step's random numbers for a parameter. They are scalars on the host, int64, so that
    compiled code is the same for all.

    key: 32 random bits. offset: of this rank's first element in the whole parameter. strides: in the whole parameter.
    """

    key: Tensor
    offset: Tensor
    strides: tuple[Tensor, ...]

    def sixteen_bits(self, like: Tensor) -> Tensor:
        """Return uniform integers in 0 .. 65535, int32, in the shape of this rank's shard."""
        place = self.offset  # a host scalar, which kernels take as an argument: nothing waits
        # The element's place in the whole parameter, from its index in this shard.
        for dim, (size, stride) in enumerate(zip(like.shape, self.strides, strict=True)):
            along = torch.arange(size, device=like.device) * stride
            place = along.view(-1, *[1] * (like.ndim - dim - 1)) + place
        return (_hash32(place ^ self.key) >> 16).int()


class RoundingNoise:
    """Draw the noise of one parameter, step by step."""

    def __init__(self, parameter: Tensor, *, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"rounding/{seed}/{name}".encode(), digest_size=4).digest()
        # A key from the parameter's name, so that equal shapes get different noise.
        self.seed = int.from_bytes(digest, "little")
        strides, begin = parameter.stride(), [0] * parameter.ndim
        if isinstance(parameter, DTensor):
            _, begin = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
        self.offset = torch.tensor(sum(b * s for b, s in zip(begin, strides, strict=True)))
        self.strides = tuple(torch.tensor(stride) for stride in strides)

    def at_step(self, step: int) -> StepNoise:
        """Return the noise of a step."""
        key = _hash32(self.seed ^ _hash32(step))
        return StepNoise(torch.tensor(key), self.offset, self.strides)


def store(target: Tensor, value: Tensor, noise: StepNoise | None = None) -> None:
    """Copy fp32 values into a tensor of any precision: to the nearest, or into bf16 stochastically."""
    if noise is not None:
        assert target.dtype == torch.bfloat16, "rules.py"
        # Of fp32's 32 bits bf16 keeps the upper 16: adding noise to the lower ones carries with the right odds.
        bits = value.view(torch.int32) + noise.sixteen_bits(value)
        # -65536 clears the lower 16 bits. Infinities and nan must not carry into other values.
        value = torch.where(value.isfinite(), (bits & -65536).view(torch.float32), value)
    target.copy_(value)


def _hash32(x: Any) -> Any:
    """Mix an integer, or a tensor of int64, from 0 .. 2^32 - 1: every bit of the result depends on every bit of x
    ("lowbias32", found by Chris Wellons' search for such functions).

    Multipliers above 2^31 are written less 2^32: the same modulo 2^32, and no product leaves 64 bits.
    """
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - 2**32)):
        x = ((x ^ (x >> shift)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 15)
