"""Train a small mixture of experts and its dense twin of equal active parameters on the demo's text, and draw what came out.

    python scripts/moe_curve.py run     # into outputs/moe_curve: one thread, one run after the other; leaves finished runs as they are
    python scripts/moe_curve.py draw    # docs/pictures/moe_curve.png and moe_loads.png, and the table of docs/moe.md

The twin has one feed-forward layer as wide as the experts that a token meets. Data, seed and schedule are the same in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from titan.base.rows import read_rows
from titan.config.toml import tomllib

ROOT = Path(__file__).parents[1]
OUT, PICTURES = ROOT / "outputs" / "moe_curve", ROOT / "docs" / "pictures"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RUNS = TABLES["runs"]


def run() -> None:
    for name, row in RUNS.items():
        if (OUT / name / "status.json").exists():
            continue
        command = [sys.executable, "-m", "titan.cli", "train", "train_configs/demo.toml"]
        command += [*TABLES["common"], f"--job.dump_folder={OUT / name}", *row["settings"]]
        # One thread gives the same sums each time.
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def draw() -> None:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    rows = {name: read_rows(OUT / name / "metrics.jsonl") for name in RUNS}
    figure = Figure(figsize=(11, 3.8))
    left, right = figure.subplots(1, 2)
    for name, of_run in rows.items():
        style = {key: RUNS[name][key] for key in ("color", "label")}
        left.plot(*column(of_run, "validation_loss"), marker="o", markersize=4, **style)
        if name != "dense":
            right.plot(*column(of_run, "expert_imbalance"), **style)
    left.set(title="Validation loss, nats per byte")
    right.set(title="Tokens of the busiest expert over the mean, worst layer", ylim=(1, 4.1))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, "moe_curve.png")
    figure = Figure(figsize=(11, 2.6))
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("balanced", "unbalanced"), strict=True):
        table = json.loads((OUT / name / "experts.json").read_text())
        ratios = [[n * len(loads) / sum(loads) for n in loads] for loads in table["loads"]]
        axes.imshow(ratios, cmap="RdBu_r", norm=TwoSlopeNorm(1, vmin=0, vmax=4), aspect="auto")
        for layer, of_layer in enumerate(ratios):
            for expert, ratio in enumerate(of_layer):
                color = "black" if 0.3 < ratio < 2.8 else "white"
                axes.text(expert, layer, f"{ratio:.2f}", ha="center", va="center", color=color)
        axes.set(
            title=f"{RUNS[name]['label']}, step {table['step']}",
            xlabel="expert",
            ylabel="layer",
        )
        axes.set_yticks(range(len(ratios)))
    save(figure, "moe_loads.png")
    print("| run | validation loss | maxvio of each layer | dead experts |\n|---|--:|---|--:|")
    for name, of_run in rows.items():
        _, validation = column(of_run, "validation_loss")
        last: dict[str, Any] = of_run[-1].get("experts", {})
        maxvio = ", ".join(f"{value:.2f}" for value in last.get("maxvio", [])) or "-"
        dead = sum(last["dead"]) if last else "-"
        print(f"| {RUNS[name]['label']} | {validation[-1]:.4f} | {maxvio} | {dead} |")


def column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps of the rows that have a number in a column, and the numbers."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(PICTURES / name, dpi=110)
    print(f"wrote {PICTURES / name}")


if __name__ == "__main__":
    {"run": run, "draw": draw}[sys.argv[1]]()
