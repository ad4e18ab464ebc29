"""Train the demo's text with HSDP of two ranks, and with two groups of one rank that meet now and then, and draw their validation losses.

    python scripts/elastic_curve.py run     # into outputs/elastic_curve, one run after the other; leaves finished runs as they are
    python scripts/elastic_curve.py draw    # docs/pictures/elastic_curves.png, and the last losses

All runs have the same samples, seed, schedule and tokens. Validations are at meetings, when groups have equal weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moe_curve import ROOT, save

from titan.observe.rows import read_rows
from titan.tools.plot import points

OUT = ROOT / "outputs" / "elastic_curve"
COMMON = [
    *("--training.steps=500", "--debug.seed=1", "--metrics.enable_tensorboard=false"),
    "--validation.freq=50",
]
GROUPS = [
    *("--elastic", "--groups", "2", "--nproc", "1", "--validation.steps=16"),
    "--fault_tolerance.process_group_timeout_ms=120000",
]
HSDP = [
    *("--nproc", "2", "--validation.steps=8"),
    *("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
]  # fmt: skip


def groups(method: str, *, sync_steps: int) -> list[str]:
    """Return the settings of two groups."""
    keys = {"semi_sync_method": method, "sync_steps": sync_steps}
    return [*GROUPS, *(f"--fault_tolerance.{key}={value}" for key, value in keys.items())]


RUNS = {
    "HSDP": HSDP,
    "local_sgd, 10 steps": groups("local_sgd", sync_steps=10),
    "local_sgd, 50 steps": groups("local_sgd", sync_steps=50),
    "diloco, 50 steps": groups("diloco", sync_steps=50),
    "diloco, 10 steps": groups("diloco", sync_steps=10),
}


def folder_of(name: str) -> Path:
    return OUT / name.replace(", ", "-").replace(" ", "-")


def run() -> None:
    for name, settings in RUNS.items():
        folder = folder_of(name)
        if not [*folder.rglob("status.json")]:
            command = [sys.executable, "-m", "titan.cli", "train", "train_configs/demo.toml"]
            command += [*COMMON, *settings, f"--job.dump_folder={folder}"]
            # One thread gives the same sums each time.
            subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    print("| run | validation loss |\n|---|--:|")
    for name in RUNS:
        folder = folder_of(name)
        rows = read_rows(min(folder.rglob("metrics.jsonl")))
        tokens, losses = points(rows, "tokens", "validation_loss")
        axes.plot([count / 1e6 for count in tokens], losses, marker="o", markersize=4, label=name)
        print(f"| {name} | {losses[-1]:.3f} |")
    axes.set(xlabel="million tokens", ylabel="validation loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, "elastic_curves.png")


if __name__ == "__main__":
    {"run": run, "draw": draw}[sys.argv[1]]()
