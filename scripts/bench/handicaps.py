"""Does `titan compare` price a recipe right? `python scripts/bench/handicaps.py FOLDER`

Small Llamas learn the bytes of the Python library. `titan compare` prices seven pairs of short runs with three seeds. Longer runs with three
other seeds tell the truth: the tokens after which B has the loss of A. With a constant rate they are read off one long run; with a
decaying rate a run of each length is trained. The last pair has two layouts with two prices, so that its truth is in money.
Runs that are in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from titan.base.rows import read_rows
from titan.cli import main as titan
from titan.contrib.scaling import paired
from titan.tools.plot import points

STEPS, LENGTHS, TRAINED, OTHERS = 200, (0.5, 0.75, 1, 1.5, 2, 3), (0, 1, 2), (100, 101, 102)
JOB = """
[model]
flavor = "tiny"
overrides = { dim = 32, n_layers = 1, ffn_dim = 96, vocab_size = 258, n_heads = 2, n_kv_heads = 1 }
[tokenizer]
name = "bytes"
[training]
seq_len = 32
global_batch_size = 8
local_batch_size = 4
[optimizer]
lr = 4e-3
[lr_scheduler]
warmup_steps = 20
[metrics]
log_freq = 5
[checkpoint]
enable = false
[simulator.run]
gpu_hour_price = 2
"""
RATE, WIDTH = "optimizer.lr=2e-3", "model.overrides.ffn_dim=16"
# What A and B change, whether the rate decays, and the ranks of B.
PAIRS = {
    "half the rate": ([], [RATE], False, 1),
    "a sixth of the width of the MLP": ([], [WIDTH], False, 1),
    "AdamW for Muon": ([], ["optimizer.name=Muon"], False, 1),
    "half the rate, decaying": ([], [RATE], True, 1),
    "AdamW for Muon, decaying": ([], ["optimizer.name=Muon"], True, 1),
    "a sixth of the width of the MLP, decaying": ([], [WIDTH], True, 1),
    "half the rate on two ranks at 3 per hour": (
        [],
        [RATE, "simulator.run.gpu_hour_price=3"],
        False,
        2,
    ),
}


def train(
    folder: Path,
    changes: Sequence[str],
    seeds: Sequence[int],
    *,
    times: float,
    decays: bool,
    ranks: int,
) -> list[Path]:
    """Train the runs of a recipe that are not there, and return their folders."""
    steps = round(times * STEPS)
    name = ",".join(
        ["plain", *changes, f"{steps} steps", *["decays"] * decays, f"{ranks} ranks"]
    )
    found = []
    for seed in seeds:
        run = folder / name.replace("/", "_") / str(seed)
        found.append(run)
        if (run / "done").exists():
            continue
        words = [
            "train",
            str(folder / "job.toml"),
            "--quiet",
            f"--nproc={ranks}",
            *map("--{}".format, changes),
        ]
        words += [
            f"--debug.seed={seed}",
            f"--job.dump_folder={run}",
            f"--training.steps={steps}",
        ]
        words += [] if decays else ["--lr_scheduler.decay_ratio=0"]
        context = get_context("forkserver")
        context.set_forkserver_preload(["titan.run.train"])
        process = context.Process(target=titan, args=(words,))
        process.start()
        process.join()
        (run / "done").write_text(f"{process.exitcode}\n")
        print(f"{run.parent.name}: seed {seed}", file=sys.stderr, flush=True)
    return found


def loss_at(runs: Sequence[Path], times: float, column: str = "loss_mean") -> float:
    """Return the mean figure of the last quarter of runs that end after some times of the steps."""
    found = []
    for run in runs:
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= times * STEPS]
        found.append(paired.final(points(rows, "tokens", column)))
    return fmean(found)


def truth(
    folder: Path, a: Sequence[str], b: Sequence[str], *, decays: bool, ranks: int
) -> tuple[float, float]:
    """Return the factor in tokens after which B has the loss of A, and the factor in money."""
    folder /= "truth"
    level_runs = train(folder, a, OTHERS, times=1, decays=decays, ranks=1)
    level, last = loss_at(level_runs, 1), max(LENGTHS)
    if decays:
        runs = {n: train(folder, b, OTHERS, times=n, decays=True, ranks=ranks) for n in LENGTHS}
        curve = [(math.log(n), loss_at(runs[n], n)) for n in LENGTHS]
    else:
        long = train(folder, b, OTHERS, times=last, decays=False, ranks=ranks)
        ends = [n / 40 for n in range(10, round(40 * last) + 1)]
        curve, runs = [(math.log(n), loss_at(long, n)) for n in ends], {last: long}
    for (before, high), (after, low) in pairwise(curve):
        if low <= level < high:
            tokens = math.exp(before + (after - before) * (high - level) / (high - low))
            speeds = [loss_at(each, last, "tokens_per_s") for each in (level_runs, runs[last])]
            price = 3 / 2 if ranks > 1 else 1
            return tokens, tokens * speeds[0] / speeds[1] * ranks * price
    return math.nan, math.nan


def main() -> None:
    """Train, compare, and print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    folder = parser.parse_args().folder.absolute()
    for part in (folder / "truth", folder):
        part.mkdir(parents=True, exist_ok=True)
        (part / "job.toml").write_text(JOB)
    for name, (a, b, decays, ranks) in PAIRS.items():
        one = train(folder, a, TRAINED, times=1, decays=decays, ranks=1)
        two = train(folder, b, TRAINED, times=1, decays=decays, ranks=ranks)
        answer = folder / "answer.json"
        titan(["compare", str(one[0].parent), str(two[0].parent), f"--json={answer}"])
        found = json.loads(answer.read_text())
        factors = truth(folder, a, b, decays=decays, ranks=ranks)
        for what, factor in zip(("tokens", "money"), factors, strict=True):
            if what == "tokens" or ranks > 1:
                print(
                    f"{name}: {verdict(what, found['changes'].get(what), factor)}", flush=True
                )
        print(f"  {found['answer']}", flush=True)


def verdict(what: str, change: Sequence[float | None] | None, truth: float) -> str:
    """Return whether the truth is in the interval of a change, in words. JSON has null for an infinite end."""
    if change is None:
        return f"{what} without a price, truth x {truth:.2f}"
    value, low, high = change
    ends = [0.0 if low is None else math.exp(low), math.inf if high is None else math.exp(high)]
    inside = "inside" if ends[0] <= truth <= ends[1] else "OUTSIDE"
    return f"{what} x {math.exp(value or 0):.2f} ({ends[0]:.2f} to {ends[1]:.2f}), truth x {truth:.2f}: {inside}"


if __name__ == "__main__":
    main()
