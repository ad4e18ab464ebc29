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


def levels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 levels of signed values (first moments) and of values from 0 (second moments), fp32, ascending."""
    return _levels(True).to(device), _levels(False).to(device)


def _levels(signed: bool) -> Tensor:
    values = [0.0, 1.0]
    # Seven decades below 1, each evenly spaced: its levels are the middles between its edges.
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantize(x: Tensor, num_blocks: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (shape of x, uint8) and scales (..., num_blocks) of an fp32 tensor."""
    blocks = x.unflatten(-1, (num_blocks, -1))
    # Blocks of zeros would divide by 0.
    scale = blocks.abs().amax(-1).clamp(min=1e-12)
    # The nearest level: bucketize finds between which middles a value is.
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scale[..., None], middles, right=True, out_int32=True)
    return codes.to(torch.uint8).flatten(-2), scale


def dequantize(codes: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """Return fp32 values in the shape of codes."""
    values = levels[codes.int()].unflatten(-1, (scale.shape[-1], -1))
    return (values * scale[..., None]).flatten(-2)
