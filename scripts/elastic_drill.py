"""Kill replica groups at random while they train, and check every step against one process that repeats it.

    python scripts/elastic_drill.py FOLDER [--groups 3] [--nproc 2] [--steps 200] [--every 20] [--runs 1] [--seed 0]

Prints a line for each run: kills, seconds from a kill to the survivors' next step and to full strength, and the largest
relative difference of loss and gradient norm. Exit code 1 if a step differs by more than 1e-5, or a sample is lost or comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
BOUND = 1e-5
_JOB = ("train_configs/debug_model.toml", "--model.flavor=tiny")
_SETTINGS = (
    *("--training.local_batch_size=2", "--metrics.log_freq=1", "--training.dataset=synthetic"),
    *("--checkpoint.enable=true", "--checkpoint.interval=50", "--lr_scheduler.warmup_steps=2"),
    # Steps in proportion to gradients: else rounding errors grow over hundreds of steps in any two layouts. And small ones: at
    # 1e-3 the gradient of one step in 2,000 depends on the order of sums (1.3e-5 between two orders on one process).
    *("--optimizer.eps=1e-3", "--optimizer.lr=3e-4"),
)


def settings(options: argparse.Namespace) -> list[str]:
    """Return the job's arguments."""
    sizes = [f"--training.steps={options.steps}", f"--training.seq_len={options.seq_len}"]
    return [*_JOB, *_SETTINGS, *sizes, *getattr(options, "more", ())]


def rows_of(folder: Path, groups: str = "group-*") -> list[dict[str, Any]]:
    """Return the rows of the groups, those of one step beside each other."""
    found: list[dict[str, Any]] = []
    for file in sorted(folder.glob(f"{groups}/metrics.jsonl")):
        lines = file.read_text().splitlines()
        found += [
            json.loads(line) | {"group": file.parent.name}
            for line in lines
            if line.endswith("}")
        ]
    return sorted(found, key=lambda row: row["step"])


def drill(folder: Path, options: argparse.Namespace, seed: int) -> list[dict[str, float]]:
    """Run the groups, and kill one every so often; return what each kill cost."""
    generator = random.Random(seed)
    command = [sys.executable, "-m", "titan.cli", "train", *settings(options), "--elastic"]
    command += [
        "--groups",
        str(options.groups),
        "--nproc",
        str(options.nproc),
        "--max-restarts",
        "100",
    ]
    command += [f"--job.dump_folder={folder}"]
    kills: list[dict[str, float]] = []
    with (folder.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        next_s = None
        while process.poll() is None:
            time.sleep(0.1)
            rows = rows_of(folder)
            # The first kill comes some seconds after all groups train together. A group may be killed while it returns, but
            # never the last one that trains.
            groups = rows[-1]["replica_groups"] if rows else 0
            if next_s is None and groups == options.groups:
                next_s = time.time() + options.every
            is_due = next_s is not None and time.time() > next_s
            is_alone = groups < 2 or any("next_step_s" not in kill for kill in kills)
            if is_due and not is_alone and rows[-1]["step"] < options.steps - 5:
                _kill(folder / f"group-{generator.randrange(options.groups)}")
                kills.append({"at_s": time.time(), "step": rows[-1]["step"]})
                next_s = time.time() + options.every
            for kill in kills:
                _measure(kill, rows, options.groups)
    if process.returncode:
        raise SystemExit(
            f"the run ended with {process.returncode}; see {folder.with_suffix('.log')}"
        )
    return kills


def _kill(group: Path) -> None:
    """End all processes of a group, by its run folder, as the loss of its node does."""
    mark = f"--job.dump_folder={group}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if mark in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:  # noqa: PERF203
            continue


def _measure(kill: dict[str, float], rows: list[dict[str, Any]], groups: int) -> None:
    later = [row for row in rows if row["step"] > kill["step"] + 1]
    now = time.time() - kill["at_s"]
    if later and "next_step_s" not in kill:
        kill["next_step_s"] = now
    if later and "full_s" not in kill and later[-1]["replica_groups"] == groups:
        kill["full_s"] = now


def replay(folder: Path, options: argparse.Namespace) -> float:
    """Repeat every step on one process; return the largest relative difference. Raises SystemExit for wrong samples."""
    import torch

    from titan.config.layout import resolve_layout
    from titan.config.load import load_from_argv
    from titan.data.base import ShardSpec
    from titan.parallel import build_mesh
    from titan.parallel.init_distributed import start_process_group
    from titan.step.resolved import resolve_job
    from titan.step.train_step import build_train_step

    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(folder):
        by_step.setdefault(row["step"], []).append(row)
    config = load_from_argv(settings(options), warn=False).on_device("cpu")
    if not torch.distributed.is_initialized():
        start_process_group(init_timeout_s=60, expandable_segments=False)
    job = resolve_job(config, resolve_layout(config, 1), device="cpu")
    train_step = build_train_step(job, device=torch.device("cpu"), mesh=build_mesh("cpu"))
    loader, position, tokens, worst = train_step.task.loader(rank=0, world=1), 0, 0, 0.0
    for step in range(1, options.steps + 1):
        rows = by_step.get(step, [])
        if (
            not rows
            or len(
                {(row["first_sample"], row["tokens"], row["replica_groups"]) for row in rows}
            )
            > 1
        ):
            raise SystemExit(f"step {step}: groups disagree about their samples: {rows}")
        row = rows[-1]
        count = (row["tokens"] - tokens) // config.training.seq_len
        if row["first_sample"] != position:
            raise SystemExit(
                f"step {step} begins at sample {row['first_sample']}, and the one before ended at {position}"
            )
        loader.set_shard(ShardSpec(rank=0, world=1, batch=count))
        report = train_step.train(loader.next_step(), step=step)
        for name, value in (
            ("loss", report.loss.item()),
            ("grad_norm", report.grad_norm.item()),
        ):
            worst = max(worst, *(abs(row[name] - value) / abs(value) for row in rows))
        position, tokens = position + count, row["tokens"]
    loader.close()
    return worst


def main() -> int:
    """Run the drill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, default in (
        *(
            ("groups", 3),
            ("nproc", 2),
            ("steps", 200),
            ("runs", 1),
            ("seed", 0),
            ("seq_len", 64),
        ),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=float, default=20, help="seconds between two kills")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    worst, waits, full = 0.0, [], []
    for number in range(options.runs):
        folder = options.folder / f"run-{number}"
        kills = drill(folder, options, options.seed + number)
        worst = max(worst, difference := replay(folder, options))
        waits += [kill["next_step_s"] for kill in kills if "next_step_s" in kill]
        full += [kill["full_s"] for kill in kills if "full_s" in kill]
        print(
            f"run {number}: {len(kills)} kills, largest difference {difference:.1e}", flush=True
        )
    for what, values in (("next step of the survivors", waits), ("full strength", full)):
        if values:
            print(
                f"{what}: median {median(values):.1f} s, worst {max(values):.1f} s, {len(values)} kills"
            )
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
