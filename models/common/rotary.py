"""Rotary position embeddings (RoFormer, arXiv:2104.09864), and two ways to stretch their context.

B batch, S sequence, H heads, K head dim, R channels of a head that rotate
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .config import RopeScaling

# YaRN leaves channels alone that turn this often within the original context, and stretches those that turn less than once.
_FAST_TURNS, _SLOW_TURNS = 32, 1


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Return the rotation per position of each pair of channels (RoFormer, arXiv:2104.09864).

    Args:
        head_dim: channels of a head, K.
        theta: base of the frequencies.
        scaling: Llama 3.1's scaling. Wavelengths that fit often enough into the original context stay, longer ones are
            stretched by `factor`, and those between are interpolated. None: no scaling.
        device: device of the result.

    Returns:
        Radians per position, (K/2,) fp32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = (
        scaling.original_context * frequencies / (2 * math.pi)
    )  # within the original context
    # 1 for short wavelengths, 0 for long ones, and between them in proportion.
    keep = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotation_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return the table that `rotate` multiplies by.

    Args:
        positions: positions, (...).
        frequencies: rotation per position of each pair of channels, (K/2,), in radians.

    Returns:
        Cosines of all channels, then sines, which are negative in the first half, (..., 2K) fp32.
    """
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos, -sin, sin], dim=-1)


def rotate(x_BSHK: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel i against channel i + K/2 by the position's angle, in fp32.

    Args:
        x_BSHK: queries or keys.
        cos_sin: the two halves of `rotation_table`, with a dimension for the heads.

    Returns:
        The rotated heads, with the shape and dtype of x.
    """
    cos, sin = cos_sin
    x = x_BSHK.float()
    # Channel i + K/2 moves to i, and the reverse. Not addcmul, which rounds once less than transformers does.
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x_BSHK.dtype)


def yarn_frequencies(
    config: Any, size: int, device: torch.device, *, truncate: bool = True
) -> Tensor:
    """Return the rotation per position of each pair of channels with YaRN (arXiv:2309.00071).

    Args:
        config: a family's sizes, with rope_theta, rope_factor and original_context.
        size: channels of a head that rotate, R.
        device: device of the result.
        truncate: round the first and the last stretched pair outwards to whole pairs.

    Returns:
        Radians per position, (R/2,) fp32.
    """
    theta = config.rope_theta
    frequencies = rope_frequencies(size, theta, None, device)
    if not config.rope_factor:
        return frequencies

    def pair_that_turns(times: float) -> float:
        ratio = config.original_context / (times * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(theta))

    # Between these pairs of channels frequencies go from unchanged to divided by the factor.
    first, last = pair_that_turns(_FAST_TURNS), pair_that_turns(_SLOW_TURNS)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float32, device=device)
    # 0 for fast pairs, 1 for slow ones. The tiny number avoids a division by zero.
    stretch = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return (1 - stretch) * frequencies + stretch * frequencies / config.rope_factor


def rotate_pairs(x_BSHR: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel 2i against channel 2i + 1.

    The result has all first channels before all second channels. Queries and keys are reordered alike, which leaves their dot
    products unchanged.

    Args:
        x_BSHR: queries or keys.
        cos_sin: as for `rotate`.

    Returns:
        The rotated heads, with the shape and dtype of x.
    """
    return rotate(torch.cat([x_BSHR[..., 0::2], x_BSHR[..., 1::2]], dim=-1), cos_sin)
