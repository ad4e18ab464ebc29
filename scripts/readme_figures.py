"""Write the README's table of figures from what holds them: docs/parity.md, tests/parity/rows.csv, train_configs/published/accuracy.md.

python scripts/readme_figures.py            # a test fails if the table is stale
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ACCURACY = "train_configs/published/accuracy.md"
BEGIN, END = "<!-- figures: written by scripts/readme_figures.py -->", "<!-- end of figures -->"


def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str, width: int) -> list[list[str]]:
    """Return the cells of all table rows with so many columns, without heads."""
    lines = (
        line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")
    )
    found = [[cell.strip() for cell in line] for line in lines if len(line) == width]
    return [row for row in found if not set("".join(row)) <= set("-: ")]


def parity() -> str:
    """Count the layouts, and find the largest difference of their weights."""
    with (ROOT / "tests/parity/rows.csv").open(newline="") as file:
        layouts = [row for row in csv.DictReader(file) if row["table"] != "composed"]
    # A moment of 8 bits may round to its neighbour; the page explains it.
    plain = [float(row["weights"]) for row in layouts if "8-bit" not in row["layout"]]
    return f"{len(layouts)} layouts against one process; weights after ten steps are within {max(plain):.0e} in fp32"


def accuracy(row: str) -> str:
    match = re.search(
        rf"^\| {row} \| ([\d.]+%) \| ([+-][\d.]+%) \|", page(ACCURACY), re.MULTILINE
    )
    assert match, row
    return f"{match[1]} off on average, {match[2]} at worst"


def left_out() -> str:
    """Return which rows the mean leaves out, with the worst error of the whole page."""
    every = [row for row in rows(page(ACCURACY), 9) if row[2] == "report" and row[5]]
    worst = max((row[5] for row in every), key=lambda error: abs(float(error.rstrip("%"))))
    return (
        "Left out, with reasons in the file: rowwise float8, experts, graph_trainer and GPUs of unknown power, up to "
        f"{worst}"
    )


def search(pattern: str) -> re.Match[str]:
    match = re.search(pattern, page("docs/parity.md"), re.DOTALL)
    assert match, pattern
    return match


def table() -> str:
    """Return the table, between its marks."""
    loss = search(r"losses\s+differ\s+by\s+at\s+most\s+([\d.e-]+)\s+of")[1]
    start = search(
        r"Width 64[^\n]*one rank.*?\| titan \|[^|]*\|[^|]*\|[^|]*\(([\d.]+)\).*?"
        r"\| TorchTitan \|[^|]*\|[^|]*\|[^|]*\(([\d.]+)\).*?\| HF Trainer \|[^|]*\|[^|]*\|[^|]*\(([\d.]+)\)"
    )
    h100 = search(r"\| 1B, compiled \| ([\d,]+) \| ([\d.]+%) \| ([\d,]+) \|[^|]*\| ([\d,]+) \|")
    count = re.search(r"Over (\d+) report rows", page(ACCURACY))
    assert count
    lines = [
        (
            "Llama 1B on one H100, compiled, sequences of 8,192 tokens",
            f"{h100[1]} tokens/s, {h100[2]} MFU; a bare loop {h100[3]}; predicted {h100[4]}",
            "One H100",
        ),
        (
            "Same loss as TorchTitan over 1,000 steps",
            f"to {loss}",
            "The same loss as TorchTitan",
        ),
        ("Same numbers in every layout", parity(), "Every layout computes the same numbers"),
        (
            f"Predicted speed of {count[1]} published TorchTitan runs",
            f"{accuracy('tokens/s/GPU')}. {left_out()}",
            ACCURACY,
        ),
        ("Predicted memory of these runs", accuracy("reserved memory"), ACCURACY),
        (
            "Command to first step, over a bare loop's",
            f"{start[1]}; TorchTitan {start[2]}, HF Trainer {start[3]}",
            "Small steps and the start",
        ),
    ]
    body = "\n".join(f"| {what} | {figure} | {_link(where)} |" for what, figure, where in lines)
    return f"{BEGIN}\n| | measured | page |\n|---|---|---|\n{body}\n{END}"


def _link(where: str) -> str:
    """Return the link to a file, or to a section of docs/parity.md."""
    if where.endswith(".md"):
        return f"[{Path(where).stem}]({where})"
    return f"[parity](docs/parity.md#{where.lower().replace(' ', '-')})"


def updated(text: str) -> str:
    """Return the README with today's table."""
    before, rest = text.split(BEGIN)
    return before + table() + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
