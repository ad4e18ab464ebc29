"""Read pictures that anyone may have written."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

from titan.data import require

_NARROW = 1000  # times as long as wide: scaled, such a picture would take gigabytes


def read_picture(file: Path | IO[bytes], mode: str) -> Any:
    """Return a Pillow picture of 8 bits in a mode, "L" (grey) or "RGB". Raises what Pillow does, and ValueError for a strip."""
    image = require("PIL.Image", purpose="pictures", extra="vision")
    opened = image.open(file)
    if max(opened.size) > _NARROW * min(opened.size):
        width, height = opened.size
        raise ValueError(f"{width:,} x {height:,} pixels are a strip, not a picture")
    # Grey of 16 bits, which Pillow would cut off at 255.
    if opened.mode.startswith("I"):
        opened = image.fromarray((np.asarray(opened).astype(np.int64) // 257).astype(np.uint8))
    return opened.convert(mode)
