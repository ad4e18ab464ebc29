"""Endless dataset of drawn shapes, which the diffusion demo trains on.

x, y: coordinates from -1 to 1
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from titan.data.order import derive_key

from .flow_data import FlowSamples
from .flow_options import SHAPES

_NUM_VALIDATION = 1024


class Shapes(FlowSamples):
    """Endless dataset of light shapes of random size and position, in grey or colours."""

    def open(self) -> None:
        self.num_items = 0 if self.split == "train" else _NUM_VALIDATION

    def item(self, place: int) -> tuple[ndarray, ...]:
        random = np.random.Generator(
            np.random.Philox(key=derive_key(self.seed, self.split, place))
        )
        label = int(random.integers(self.options.classes))
        radius, (x, y) = random.uniform(0.55, 0.8), random.uniform(-0.2, 0.2, size=2)
        size = self.options.size
        rows, columns = np.meshgrid(
            *[(np.arange(size) + 0.5) * 2 / size - 1] * 2, indexing="ij"
        )
        distance = (
            _distance(SHAPES[label], (columns - x) / radius, (rows - y) / radius) * radius
        )
        inside = np.clip(0.5 - distance * size / 2, 0, 1)  # an edge is a pixel wide
        light = random.uniform(0.5, 1, size=(self.options.channels, 1, 1))
        return ((2 * light * inside - 1).astype(np.float32), *self.label(label))


def _distance(shape: str, x: ndarray, y: ndarray) -> ndarray:
    """Return the approximate distance of points from the edge of a shape of radius 1, negative inside."""
    far, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    if shape in ("plus", "cross"):
        if shape == "cross":
            x, y = (x + y) / 2**0.5, (x - y) / 2**0.5
        return np.maximum(np.minimum(abs(x), abs(y)) - 0.3, np.maximum(abs(x), abs(y)) - 1)
    return {
        "disc": far - 1,
        "ring": abs(far - 0.75) - 0.25,
        "square": square - 0.9,
        "frame": abs(square - 0.7) - 0.22,
        "triangle": np.maximum(0.87 * abs(x) - 0.5 * y, y) - 0.6,
        "bars": np.maximum(abs(x) - 0.9, abs(abs(y) - 0.55) - 0.27),
    }[shape]
