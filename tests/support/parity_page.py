"""The rows of the parity tests, and the table of docs/parity.md that sums them up.

pytest tests/parity -m "slow or not slow"     writes build/parity/TABLE.csv when all rows of a table ran
python -m tests.support.parity_page           takes these into tests/parity/rows.csv, and renews the page's table
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROWS, PAGE, BUILD = (
    ROOT / "tests/parity/rows.csv",
    ROOT / "docs/parity.md",
    ROOT / "build/parity",
)
BEGIN, END = "<!-- rows: written by tests/support/parity_page.py -->", "<!-- end of rows -->"


class Row(NamedTuple):
    """A layout, and its largest relative differences from one process; table: "dense", "composed" or "experts"."""

    table: str
    layout: str
    mesh: str
    accumulation: str
    loss: str
    norm: str
    gradients: str
    weights: str
    bound: str


def _mesh(axis: str) -> Callable[[Row], bool]:
    return lambda row: re.search(rf"\b{axis} ", row.mesh) is not None


def _named(*words: str) -> Callable[[Row], bool]:
    return lambda row: any(word in row.layout for word in words)


# Float8 and moments of 8 bits round, so they are apart from all others.
APART: dict[str, Callable[[Row], bool]] = {
    "float8": _named("float8"),
    "moments of 8 bits": _named("8-bit"),
}
TECHNIQUES: dict[str, Callable[[Row], bool]] = {
    "all of these": lambda row: True,
    "FSDP2": _mesh("dp_shard"),
    "DDP, HSDP": _mesh("dp_replicate"),
    "TP with sequence parallelism": _mesh("tp"),
    "CP": _mesh("cp"),
    "PP, every schedule": _mesh("pp"),
    "four axes at once": lambda row: row.mesh.count(" x ") >= 3,
    "accumulation": lambda row: row.accumulation != "1",
    "experts": lambda row: row.table == "experts",
    "experts, EP 2 to 8": _named("EP 2", "EP 4", "EP 8"),
    "recomputation": _named("AC", "memory budget"),
    "compiled": _named("compiled"),
    "parameters on the host": _named("on the host"),
    "frozen parameters": _named("frozen"),
    "Muon": _named("Muon"),
}


def read() -> list[Row]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [Row(*line) for line in list(csv.reader(file))[1:]]


def write(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([Row._fields, *rows])


def table() -> str:
    """Return the table in Markdown: a technique, its rows, and the largest difference among them."""

    def lines(techniques: dict[str, Callable[[Row], bool]], rows: list[Row]) -> Iterator[str]:
        for name, has in techniques.items():
            found = [row for row in rows if has(row)]
            worst = [max((row[n] for row in found), key=float) for n in range(4, 8)]
            yield f"| {name} | {' | '.join([str(len(found)), *worst])} |"

    every = read()
    plain = [row for row in every if not any(has(row) for has in APART.values())]
    head = [
        "| technique | layouts | loss | gradient norm | gradients, step 1 | weights after 10 steps |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*head, *lines(TECHNIQUES, plain), *lines(APART, every)])


def updated(page: str) -> str:
    """Return the page with today's table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    rows = read()
    for file in sorted(BUILD.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as stream:
            renewed = [Row(*line) for line in list(csv.reader(stream))[1:]]
        rows = [row for row in rows if row.table != file.stem] + renewed
    write(ROWS, rows)
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
