"""Reader of quantized published weights, a rank's part at a time: fp8 of DeepSeek-V3, and MXFP4 of gpt-oss.

    fp8      NAME (F8_E4M3), and NAME_scale_inv (F32), a factor for each block of 128 x 128
    MXFP4    NAME_blocks (U8), two values of 4 bits (e2m1) in a byte, the lower half first, and NAME_scales (U8), a power of
             two (e8m0) for each 32 values (OCP Microscaling Formats 1.0, sections 5.3 and 6.3)

E experts, O outputs, I inputs, N = I / 32 blocks
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeAlias

import torch
from torch import Tensor

Where: TypeAlias = tuple[slice, ...]
SliceOf: TypeAlias = Callable[[str, Where], Tensor]
"""A function (name, slices) that returns a part of a tensor on disk."""

Form: TypeAlias = tuple[list[int], tuple[str, ...]]
"""A shape, and the dtypes that a tensor on disk may have."""

_SCALES, _PACKED, _PACKED_SCALES = "_scale_inv", "_blocks", "_scales"
_BLOCK, _PACKED_BLOCK = 128, 32
_PLAIN = ("F32", "BF16", "F16")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def stored_as(name: str, shape: list[int], names: Container[str]) -> dict[str, Form]:
    """Return the tensors on disk that represent one tensor of transformers, with their forms.

    Args:
        name: name of the tensor in transformers.
        shape: its shape.
        names: names of all tensors on disk.
    """
    if len(shape) == 2 and name + _SCALES in names:
        blocks = [-(-size // _BLOCK) for size in shape]
        return {name: (shape, ("F8_E4M3",)), name + _SCALES: (blocks, _PLAIN)}
    if len(shape) == 3 and name + _PACKED in names:
        # The published tensor is transposed.
        blocks = [shape[0], shape[2], -(-shape[1] // _PACKED_BLOCK)]
        packed = [*blocks, _PACKED_BLOCK // 2], ("U8",)
        return {name + _PACKED: packed, name + _PACKED_SCALES: (blocks, ("U8",))}
    return {name: (shape, _PLAIN)}


def values_name(name: str, names: Container[str]) -> str:
    """Return the name of the tensor on disk that contains the values of a tensor of transformers."""
    return name + _PACKED if name + _PACKED in names else name


def scales_name(name: str, names: Container[str]) -> str:
    """Return the name of the tensor on disk that contains the scales, or "" for a tensor that is not quantized."""
    suffixes = (_SCALES, _PACKED_SCALES)
    return next((name + suffix for suffix in suffixes if name + suffix in names), "")


def read_part(
    slice_of: SliceOf,
    name: str,
    where: Where,
    part: tuple[int, int] | None,
    *,
    names: Container[str],
) -> Tensor:
    """Read a part of one tensor of transformers, in fp32 if it is quantized.

    Args:
        slice_of: reads a part of a tensor on disk.
        name: name of the tensor in transformers.
        where: slices of the part. With `part`, they are slices of our tensor, (E, O, I), or (E, O) of a bias.
        part: None, or which of the last channels are ours: the first channel, and the stride to the next one. Our tensor is
            then stacked by expert and transposed.
        names: names of all tensors on disk.
    """
    stored, scales = values_name(name, names), scales_name(name, names)
    if part is None:
        return _scaled(slice_of, stored, scales, where) if scales else slice_of(stored, where)
    first, step = part
    experts, outputs, *inputs = where
    outputs = slice(outputs.start * step, outputs.stop * step)
    if scales:
        return _unpacked(slice_of, stored, scales, (experts, outputs, *inputs))[:, first::step]
    values = slice_of(stored, (experts, *inputs, outputs))[..., first::step]
    return values.mT if inputs else values


def _scaled(slice_of: SliceOf, name: str, scales: str, where: Where) -> Tensor:
    values = slice_of(name, where).float()
    factors = slice_of(scales, tuple(_blocks(part, _BLOCK) for part in where))
    for dim, part in enumerate(where):
        factors = factors.repeat_interleave(_BLOCK, dim)
        factors = factors.narrow(dim, part.start % _BLOCK, part.stop - part.start)
    return values * factors


def _unpacked(slice_of: SliceOf, name: str, scales: str, where: Where) -> Tensor:
    *rows, inputs = where
    blocks = (*rows, _blocks(inputs, _PACKED_BLOCK))
    values_EOI = from_mxfp4(slice_of(name, blocks), slice_of(scales, blocks))
    return values_EOI.narrow(-1, inputs.start % _PACKED_BLOCK, inputs.stop - inputs.start)


def from_mxfp4(blocks_EON: Tensor, scales_EON: Tensor) -> Tensor:
    """Decode MXFP4.

    Args:
        blocks_EON: (E, O, N, 16) uint8, the bytes of each block.
        scales_EON: (E, O, N) uint8, the scale of each block.

    Returns:
        The values, (E, O, I) fp32.
    """
    halves = torch.stack([blocks_EON & 15, blocks_EON >> 4], -1).flatten(-2)
    values = _E2M1[(halves & 7).int()]
    values = torch.where(halves > 7, -values, values)
    # A scale of 255 means NaN.
    return (values * scales_EON.view(torch.float8_e8m0fnu).float()[..., None]).flatten(-2)


def _blocks(part: slice, size: int) -> slice:
    """Return the range of blocks that a part touches."""
    return slice(part.start // size, -(-part.stop // size))
