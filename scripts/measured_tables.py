"""Write the tables of measured kernels that titan ships: titan/sim/hardware/measured/CARD.json, from the package aiconfigurator-core.

    pip install "aiconfigurator-core==0.12.0"
    python scripts/measured_tables.py

The files have the figures of titan/sim/price/library.py, with fewer rows of products and in letters: at most 300 kB in all.
"""

from __future__ import annotations

import json
from pathlib import Path

from titan.sim.price.library import SOURCES, read

FOLDER = Path(__file__).parents[1] / "titan" / "sim" / "hardware" / "measured"


def main() -> None:
    for card in SOURCES:
        file = FOLDER / f"{card}.json"
        text = json.dumps(read(card, small=True), indent=None, separators=(",", ":"))
        file.write_text(text + "\n", "utf-8")
        print(f"{file.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
