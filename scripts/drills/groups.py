"""Kill replica groups at random while they train, and check every step against one process that repeats it.

    python scripts/drill.py groups FOLDER [--groups 3] [--nproc 2] [--steps 200] [--every 20] [--seed 0]

Prints the number of kills, the seconds from a kill to the survivors' next step and to full strength, and the largest relative
difference of loss and gradient norm. Exit code 1 if a step differs by more than 1e-5, or a sample is lost or comes twice.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.runs import logged_rows

from .shared import ROOT, TITAN, start

BOUND = 1e-5
JOB = (
    *(f"{ROOT}/train_configs/debug_model.toml", "--model.flavor=tiny", "--training.seq_len=64"),
    *("--training.local_batch_size=2", "--metrics.log_freq=1", "--training.dataset=synthetic"),
    *("--checkpoint.enable=true", "--checkpoint.interval=50", "--lr_scheduler.warmup_steps=2"),
    # Steps in proportion to gradients: else rounding errors grow over hundreds of steps in any two layouts. And small ones: at
    # 1e-3 the gradient of one step in 2,000 depends on the order of sums (1.3e-5 between two orders on one process).
    *("--optimizer.eps=1e-3", "--optimizer.lr=3e-4"),
)
Row = dict[str, Any]
BY_STEP = itemgetter("step")


def rows_of(folder: Path, groups: str = "group-*") -> list[Row]:
    """Return the rows of the groups, those of one step beside each other."""
    found = [logged_rows(group) for group in sorted(folder.glob(groups))]
    return sorted(chain(*found), key=BY_STEP)


def drill(folder: Path, options: argparse.Namespace, chosen: random.Random) -> list[Row]:
    """Run the groups, and kill one every so often; return what each kill cost."""
    command = [*TITAN, "train", *JOB, f"--training.steps={options.steps}", "--elastic"]
    command += f"--groups {options.groups} --nproc {options.nproc} --max-restarts 100".split()
    file, next_s, kills = folder / "groups.log", math.inf, list[Row]()
    process = start([*command, f"--job.dump_folder={folder}"], file)
    while process.poll() is None:
        time.sleep(0.1)
        if not (rows := rows_of(folder)):
            continue
        now_s, step, groups = time.time(), rows[-1]["step"], rows[-1]["replica_groups"]
        for kill in kills:
            if step > kill["step"] + 1:
                kill.setdefault("next_s", now_s - kill["at_s"])
                if groups == options.groups:
                    kill.setdefault("both_s", now_s - kill["at_s"])
        # The first kill comes some seconds after all groups train together. A group may be killed while it returns, but never
        # the last one that trains.
        if groups == options.groups:
            next_s = min(next_s, now_s + options.every)
        is_alone = groups < 2 or not all("next_s" in kill for kill in kills)
        if now_s > next_s and not is_alone and step < options.steps - 5:
            _kill(folder / f"group-{chosen.randrange(options.groups)}")
            kills.append({"at_s": now_s, "step": step})
            next_s = now_s + options.every
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}; see {file}")
    return kills


def _kill(group: Path) -> None:
    """End all processes of a group, by its run folder, as the loss of its node does."""
    mark = f"--job.dump_folder={group}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def replay(folder: Path, job: Sequence[str], steps: int) -> float:
    """Repeat every step on one process; return the largest relative difference. Raises SystemExit for wrong samples."""
    import torch

    from titan.checks.layout_rules import resolve_layout
    from titan.config.load import load_from_argv
    from titan.data.base import ShardSpec
    from titan.parallel import build_mesh
    from titan.parallel.init_distributed import start_process_group
    from titan.step.resolved import resolve_job
    from titan.step.train_step import build_train_step

    argv = [*job, f"--training.steps={steps}"]
    config = load_from_argv(argv, warn=False).on_device("cpu")
    if not torch.distributed.is_initialized():
        start_process_group(init_timeout_s=60, expandable_segments=False)
    resolved = resolve_job(config, resolve_layout(config, 1), device="cpu")
    train_step = build_train_step(resolved, device=torch.device("cpu"), mesh=build_mesh("cpu"))
    by_step = {step: [*rows] for step, rows in groupby(rows_of(folder), BY_STEP)}
    loader, position, tokens, worst = train_step.task.loader(rank=0, world=1), 0, 0, 0.0
    for step in range(1, steps + 1):
        rows = by_step.get(step, [])
        facts = {(row["first_sample"], row["tokens"], row["replica_groups"]) for row in rows}
        if len(facts) != 1:
            raise SystemExit(f"step {step}: groups disagree about their samples: {rows}")
        [(first, now, _)] = facts
        if first != position:
            raise SystemExit(
                f"step {step} begins at sample {first}, and the one before ended at {position}"
            )
        count = (now - tokens) // config.training.seq_len
        loader.set_shard(ShardSpec(rank=0, world=1, batch=count))
        report = train_step.train(loader.next_step(), step=step)
        for name in ("loss", "grad_norm"):
            value = getattr(report, name).item()
            worst = max(worst, *(abs(row[name] - value) / abs(value) for row in rows))
        position, tokens = position + count, now
    loader.close()
    return worst


def seconds(events: Iterable[Row], name: str) -> list[str]:
    """Return median and worst of a figure of some events."""
    values = [event[name] for event in events if name in event]
    return [f"{median(values):.1f}", f"{max(values):.1f}"] if values else ["-", "-"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the piece's options."""
    parser.add_argument("folder", type=Path)
    for name, default in {"groups": 3, "nproc": 2, "steps": 200, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=float, default=20, help="seconds between two kills")


def run(options: argparse.Namespace) -> int:
    """Run the drill."""
    options.folder.mkdir(parents=True, exist_ok=True)
    kills = drill(options.folder, options, random.Random(options.seed))
    difference = replay(options.folder, JOB, options.steps)
    print(f"{len(kills)} kills, largest difference {difference:.1e}")
    for what, name in (("next step of the survivors", "next_s"), ("full strength", "both_s")):
        if any(name in kill for kill in kills):
            print("{}: median {} s, worst {} s".format(what, *seconds(kills, name)))
    return int(difference > BOUND)
