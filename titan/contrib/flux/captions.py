"""Page of pictures with their descriptions, which the demo of vision and language writes at each validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titan.data import require


def write_page(
    file: Path, pixels: list[np.ndarray], found: list[str], expected: list[str]
) -> None:
    """Draw pictures in four columns, each above its description.

    A correct description is green. A wrong description is red, with the expected text below it.

    Args:
        file: file of the page.
        pixels: pictures, (height, width, 3) uint8 each.
        found: descriptions that the model generates.
        expected: texts of the data.
    """
    image, drawing = (
        require(f"PIL.{name}", purpose="pictures", extra="vision")
        for name in ("Image", "ImageDraw")
    )
    width, height, side = 260, 170, 120
    page = image.new("RGB", (4 * width, height * -(-len(pixels) // 4)), "white")
    pen = drawing.Draw(page)
    for number, (picture, text, truth) in enumerate(zip(pixels, found, expected, strict=False)):
        x, y = number % 4 * width + 10, number // 4 * height + 10
        page.paste(image.fromarray(picture).resize((side, side), image.NEAREST), (x, y))
        lines = ((text, "darkgreen" if text == truth else "darkred"), (truth, "black"))
        for line, (words, colour) in enumerate(lines[: 1 + (text != truth)]):
            pen.text((x, y + side + 4 + 14 * line), words[:42], fill=colour)
    page.save(file)
