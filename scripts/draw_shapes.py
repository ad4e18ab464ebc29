"""Draw pictures of two shapes, and write what they show: data for train_configs/vision_language_demo.toml. Nothing is downloaded.

    python scripts/draw_shapes.py [FOLDER] [COUNT]     # outputs/shapes, 8000 pictures: FOLDER/captions.jsonl and FOLDER/N.png

A picture has 32 x 32 pixels. Its text names the left or the upper shape first: "a red square left of a blue circle". Colours, sizes
and places are drawn from the picture's number. There are 760 texts, so most come several times, with other pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32
COLOURS = {
    "red": (220, 50, 40),
    "green": (40, 170, 70),
    "blue": (50, 90, 220),
    "yellow": (235, 200, 40),
    "purple": (150, 60, 180),
}
SHAPES = ("square", "circle", "triangle", "cross")


def mask(shape: str, x: float, y: float, radius: float) -> np.ndarray:
    """Return which pixels a shape covers, bool (SIDE, SIDE)."""
    down, right = np.mgrid[:SIDE, :SIDE] + 0.5
    across, up = np.abs(right - x), y - down
    if shape == "square":
        return (across < 0.85 * radius) & (np.abs(up) < 0.85 * radius)
    if shape == "circle":
        return across**2 + up**2 < radius**2
    if shape == "triangle":
        return (up > -radius) & (across < (radius - up) / 2)
    bar = radius / 3
    inside = (across < radius) & (np.abs(up) < radius)
    return inside & ((across < bar) | (np.abs(up) < bar))


def draw(number: int) -> tuple[np.ndarray, str]:
    """Return a picture, uint8 (SIDE, SIDE, 3), and its text."""
    generator = np.random.default_rng(number)
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    chosen = [kinds[i] for i in generator.choice(len(kinds), size=2, replace=False)]
    is_row = bool(generator.integers(2))
    pixels = np.full((SIDE, SIDE, 3), generator.integers(225, 256), dtype=np.int64)
    # Both in one half of the other axis, so that it is clear which word is true.
    other = SIDE / 4 * (1 + 2 * generator.integers(2))
    for half, (colour, shape) in enumerate(chosen):
        radius = generator.uniform(5, 6.5)
        along = SIDE / 4 * (1 + 2 * half) + generator.uniform(-1, 1)
        beside = other + generator.uniform(-1, 1)
        x, y = (along, beside) if is_row else (beside, along)
        pixels[mask(shape, x, y, radius)] = COLOURS[colour]
    pixels += generator.integers(-6, 7, size=pixels.shape)
    first, second = (f"a {colour} {shape}" for colour, shape in chosen)
    text = f"{first} {'left of' if is_row else 'above'} {second}"
    return pixels.clip(0, 255).astype(np.uint8), text


def main(folder: str = "outputs/shapes", count: str = "8000") -> None:
    """Write the pictures and captions.jsonl."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    with (where / "captions.jsonl").open("w", encoding="utf-8") as captions:
        for number in range(int(count)):
            pixels, text = draw(number)
            Image.fromarray(pixels).save(where / f"{number}.png")
            captions.write(json.dumps({"image": f"{number}.png", "text": text}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
