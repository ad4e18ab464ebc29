"""Conversion of pictures to patches and back.

B batch, S patches, C channels of a patch, or of what the name says
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from .flow_options import FlowOptions


def to_patches(pictures: ndarray, patch: int) -> ndarray:
    """Cut (B, channels, height, width) into (B, S, C): of each patch all rows and columns of the first channel, then the others'."""
    batch, channels, height, width = pictures.shape
    parts = pictures.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return np.ascontiguousarray(
        parts.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch**2),
        dtype=np.float32,
    )


def to_pictures(patches_BSC: ndarray, options: FlowOptions) -> ndarray:
    """Return the pictures of patches: the inverse of `to_patches`."""
    side, patch, size = options.size // options.patch, options.patch, options.size
    parts = patches_BSC.reshape(-1, side, side, options.channels, patch, patch)
    return parts.transpose(0, 3, 1, 4, 2, 5).reshape(-1, options.channels, size, size)


def grid(pictures: ndarray, rows: int) -> ndarray:
    """Put pictures (rows x columns, channels, height, width) from -1 to 1 side by side: (height, width, channels) uint8."""
    framed = np.pad(pictures, ((0, 0), (0, 0), (1, 1), (1, 1)))  # a grey line around each
    values = np.clip((framed + 1) * 127.5, 0, 255).round().astype(np.uint8)
    columns, size = len(values) // rows, values.shape[-1]
    values = values.reshape(rows, columns, -1, size, size).transpose(0, 3, 1, 4, 2)
    return values.reshape(rows * size, columns * size, -1)
