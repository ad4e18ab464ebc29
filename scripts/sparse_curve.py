"""Train a small model with an indexer on the demo's text: dense, sparse from the start, and in three stages; and draw what came out.

    python scripts/sparse_curve.py run     # into outputs/sparse_curve: one thread, one run after the other; leaves finished runs as they are
    python scripts/sparse_curve.py draw    # docs/pictures/sparse_curve.png, and the table of docs/models.md

The model is DeepSeek-V3.2 of transformers without experts. Data, seed and schedule are the same in all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moe_curve import column, save

from titan.base.rows import read_rows
from titan.config.toml import tomllib

ROOT = Path(__file__).parents[1]
OUT = ROOT / "outputs" / "sparse_curve"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RUNS = TABLES["runs"]


def run() -> None:
    sizes = [f"--model.overrides.{name}={value}" for name, value in TABLES["overrides"].items()]
    for name, row in RUNS.items():
        if (OUT / name / "status.json").exists():
            continue
        command = [sys.executable, "-m", "titan.cli", "train", "train_configs/demo.toml"]
        files = [str(ROOT / "scripts" / file) for file in row.get("files", ())]
        command += [*files, *TABLES["common"], *sizes, *row["settings"]]
        command += [f"--job.dump_folder={OUT / name}"]
        # One thread gives the same sums each time.
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def draw() -> None:
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    figure = Figure(figsize=(11, 3.8))
    left, right = figure.subplots(1, 2)
    print("| run | validation loss | recall of each layer |\n|---|--:|---|")
    for name, row in RUNS.items():
        rows = read_rows(OUT / name / "metrics.jsonl")
        style = {key: row[key] for key in ("color", "label")}
        left.plot(*column(rows, "validation_loss"), marker="o", markersize=4, **style)
        recalls = [(r["step"], r["indexer"]["recall"]) for r in rows if "indexer" in r]
        for layer in range(len(recalls[0][1]) if recalls else 0):
            values = [recall[layer] for _, recall in recalls]
            fade = {"alpha": 1 - layer / 6, "color": row["color"], "linewidth": 1}
            label = (
                f"{row['label']}, layers 0 to {len(recalls[0][1]) - 1}" if not layer else None
            )
            right.plot([step for step, _ in recalls], values, label=label, **fade)
        last = ", ".join(f"{x:.2f}" for x in recalls[-1][1]) if recalls else "-"
        print(f"| {row['label']} | {column(rows, 'validation_loss')[1][-1]:.4f} | {last} |")
    left.set(title="Validation loss, nats per byte")
    right.set(title="Share of dense attention on the chosen keys", ylim=(0, 1))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, "sparse_curve.png")


if __name__ == "__main__":
    {"run": run, "draw": draw}[sys.argv[1]]()
