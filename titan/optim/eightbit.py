"""Store tensors in 8 bits: dynamic block-wise quantization (Dettmers et al., arXiv:2110.02861).

A row is cut into blocks; each is divided by its largest magnitude, and each element becomes the number (its code) of the
nearest of 256 levels. The levels form a grid that is fine near zero, since moments span many decades: decade -6 .. 0
of the range, each with twice as many levels as the one below (of one sign: half as many and their negatives).

Blocks stay within a row, and there are at least eight to a row, so that a shard of rows or of an eighth of the columns
holds whole blocks: the codes and scales of a sharded tensor are the shards of the tensor's codes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8
PARTS = 8  # of a row, each of whole blocks: tensor parallel degrees up to it cut none


def block_size(shape: Sequence[int]) -> int:
    """Return the elements in a block of a tensor of this (global) shape; 0 if 8 bits save nothing: vectors, odd rows."""
    if len(shape) < 2 or shape[-1] % PARTS:
        return 0
    # A power of two, at most 256, that divides an eighth of a row.
    block = math.gcd(LARGEST_BLOCK, shape[-1] // PARTS)
    return block if block >= SMALLEST_BLOCK else 0


@dataclass(frozen=True)
class Levels:
    """Hold the 256 levels of a code, ascending, and the 255 middles between them, fp32."""

    values: Tensor
    middles: Tensor


def levels(device: torch.device) -> tuple[Levels, Levels]:
    """Return the levels of signed values (first moments) and of values from 0 (second moments)."""
    kinds = (_levels(signed).to(device) for signed in (True, False))
    signed, positive = (Levels(x, (x[1:] + x[:-1]) / 2) for x in kinds)
    return signed, positive


def _levels(signed: bool) -> Tensor:
    values = [0.0, 1.0]
    # Seven decades below 1, each evenly spaced: its levels are the middles between its edges.
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantize(x: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Return codes (blocks, size of a block) in uint8 and scales (blocks, 1) of fp32 blocks."""
    # Blocks of zeros would divide by 0.
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    # The nearest level: bucketize finds between which middles a value is.
    codes = torch.bucketize(x / scale, levels.middles, right=True, out_int32=True)
    return codes.to(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, levels: Levels) -> Tensor:
    """Return fp32 blocks in the shape of codes."""
    return levels.values[codes.int()] * scale
