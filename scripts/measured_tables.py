"""Write the tables of measured kernels that titan ships: titan/sim/hardware/measured/CARD.json, from the package aiconfigurator-core.

    pip install "aiconfigurator-core==0.12.0"
    python scripts/measured_tables.py

The files have the figures of titan/contrib/measured/package.py, with fewer rows of products and in letters: at most 300 kB in all.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from titan.contrib.measured.package import SOURCES, read

LEFT_OUT = 51200
"""Columns or length of a sum that the shipped files do not have."""
FOLDER = Path(__file__).parents[1] / "titan" / "sim" / "hardware" / "measured"


def thinned(dtype: str, part: dict[str, Any], *, is_odd: bool = False) -> dict[str, Any]:
    """Return products without the rows that their neighbours tell: 8 bits need aligned ones, and fewer of them."""

    def is_kept(m: int) -> bool:
        if dtype == "float8":
            return not is_odd and (m % 256 == 0 or m in (1, 16, 64, 128))
        return m >= 32 or m in (1, 4, 9, 16, 17)

    points = product(*part["axes"])
    letters = {
        point: letter
        for point, letter in zip(points, part["values"], strict=True)
        if point and is_kept(point[0]) and LEFT_OUT not in point[1:]
    }
    axes = [sorted({*sizes}) for sizes in zip(*letters, strict=True)]
    return {"axes": axes, "values": "".join(letters.values())}


def main() -> None:
    for card in SOURCES:
        file = FOLDER / f"{card}.json"
        raw = read(card)
        for dtype, (aligned, odd) in raw["products"].items():
            raw["products"][dtype] = [thinned(dtype, aligned), thinned(dtype, odd, is_odd=True)]
        text = json.dumps(raw, indent=None, separators=(",", ":"))
        file.write_text(text + "\n", "utf-8")
        print(f"{file.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
