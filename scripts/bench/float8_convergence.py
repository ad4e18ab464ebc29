"""Does it learn as well in 8 bits? `python scripts/bench/float8_convergence.py` writes docs/float8_convergence.png.

The debug model of train_configs/ learns from the standard library's text in each precision: fp32, bf16, and bf16 with its linear layers in
each float8 recipe, emulated, which rounds as hardware does. All see the same samples from the same initial weights; one more bf16
run from other weights shows what difference means nothing. Two runs at a time, a thread each: about
seven minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas", "mxfp8_cublas_rceil")
SMOOTHING = 0.96  # of the running mean in the picture
PLAIN = ("fp32", "bf16", "bf16, another seed")


def settings(name: str) -> dict[str, str]:
    """Overrides of the job for a run called by its precision or its recipe."""
    if name in PLAIN:
        return {
            "training.mixed_precision_param": "float32" if name == "fp32" else "bfloat16",
            "debug.seed": str(int(name == PLAIN[-1])),
        }
    converter = f"quantize.linear.{'mx' if name.startswith('mx') else 'float8'}"
    return {
        "training.mixed_precision_param": "bfloat16",
        "model.converters": converter,
        f"{converter}.emulate": "true",
        f"{converter}.recipe_name": name,
    }


def train(name: str, *, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    run = folder / name
    overrides = {
        "job.dump_folder": str(run),
        "training.steps": str(steps),
        "training.seq_len": "128",
        "optimizer.lr": "3e-3",
        "lr_scheduler.warmup_steps": "20",
        "checkpoint.enable": "false",
        "data.validation_fraction": "0.02",
        "validation.enable": "true",
        "validation.freq": str(steps),
        "validation.steps": "32",
        **settings(name),
    }
    job = ROOT / "train_configs/debug_model.toml"
    command = [sys.executable, "-m", "titan.train", str(job)]
    command += [f"--{key}={value}" for key, value in overrides.items()]
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(f"done: {name}", file=sys.stderr)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: dict[str, list[dict[str, Any]]], *, output: Path) -> None:
    """Above: running means of the training losses. Below: each less that of bf16."""
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    means = {
        name: list(
            accumulate(
                (row["loss"] for row in rows),
                lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss,
            )
        )
        for name, rows in runs.items()
    }
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, values in means.items():
        style: dict[str, Any] = {"label": name, "linewidth": 1.2}
        if name in PLAIN:
            style |= {"color": "black", "linestyle": ("--", "-", ":")[PLAIN.index(name)]}
        numbers = range(1, len(values) + 1)
        above.plot(numbers, values, **style)
        below.plot(
            numbers, [a - b for a, b in zip(values, means["bf16"], strict=True)], **style
        )
    above.set_ylabel(f"training loss, running mean ({SMOOTHING})")
    above.set_ylim(top=min(5.0, means["bf16"][0]))
    above.legend()
    below.set(xlabel="step", ylabel="less that of bf16")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/float8_convergence.png")
    args = parser.parse_args()
    names = [*PLAIN, *RECIPES]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        jobs = [
            workers.submit(train, name, steps=args.steps, folder=Path(folder)) for name in names
        ]
        runs = {name: job.result() for name, job in zip(names, jobs, strict=True)}
    draw(runs, output=args.output)
    print(
        "| precision | training loss, mean of the last 100 steps | validation loss |\n|---|---|---|"
    )
    for name, rows in runs.items():
        last = [row["loss"] for row in rows][-100:]
        print(f"| {name} | {sum(last) / len(last):.4f} | {rows[-1]['validation_loss']:.4f} |")


if __name__ == "__main__":
    main()
