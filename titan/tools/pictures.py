"""Reader of pictures that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

from titan.data import require

_NARROW = 1000  # largest ratio of the sides; scaled, a longer strip would take gigabytes


def read_picture(file: Path | IO[bytes], mode: str) -> Any:
    """Read a picture.

    Args:
        file: path or stream of the picture.
        mode: "L" (grey) or "RGB".

    Returns:
        A Pillow image with 8 bits for each channel.

    Raises:
        ValueError: the picture is a strip, more than 1000 times as long as wide.
        Exception: Pillow cannot read the file, and raises errors of several kinds.
    """
    image = require("PIL.Image", purpose="pictures", extra="vision")
    opened = image.open(file)
    if max(opened.size) > _NARROW * min(opened.size):
        width, height = opened.size
        raise ValueError(f"{width:,} x {height:,} pixels are a strip, not a picture")
    # Scale 16-bit grey here, since Pillow would clip it at 255.
    if opened.mode.startswith("I"):
        opened = image.fromarray((np.asarray(opened).astype(np.int64) // 257).astype(np.uint8))
    return opened.convert(mode)
