"""How long a run takes from `kill -9` of a rank to its next step: the debug model on this machine's CPU.

    python scripts/bench/restart.py --processes 2,6 --rounds 5 before=../older after=.

Each NAME=FOLDER is a checkout of titan; they take turns in each round, so that other load on the machine meets all alike. A run
trains until step 12, with a checkpoint every 5 steps, and the last rank is killed. Seconds since the kill, medians and, in
parentheses, the worst, by the lines that the run prints:

    ended      no rank of the killed attempt is left
    again      rank 0 of the next attempt says so: it has read its config, and has not built anything yet
    resumed    the ranks have met and built the model, and are about to load the checkpoint
    step       the first step of the next attempt
    new step   the first step that no attempt has trained before

"first" are seconds from the command to step 1, before anything is killed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = ("first", "ended", "again", "resumed", "step", "new step")
JOB = (
    *("--model.flavor=tiny", "--training.seq_len=32", "--training.dataset=synthetic"),
    *("--training.steps=1000000", "--checkpoint.enable=true", "--checkpoint.interval=5"),
    "--max-restarts=3",
)


def measure(tree: Path, folder: str, *, processes: int) -> dict[str, float]:
    """Return the seconds of each column of one run."""
    command = [
        sys.executable,
        "-m",
        "titan.cli",
        "train",
        "train_configs/debug_model.toml",
        *JOB,
    ]
    command += [f"--job.dump_folder={folder}/run", f"--nproc={processes}"]
    variables = os.environ | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    times, begin_s, newest = dict[str, float](), time.time(), 0
    with subprocess.Popen(
        command,
        cwd=tree,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        for line in run.stdout or ():
            seconds = time.time() - begin_s
            step = int(found[1]) if (found := re.match(r"step +(\d+)/", line)) else 0
            if step == 1:
                times["first"] = seconds
            elif step >= 12 and not newest:
                newest, ranks = step, children(agent := children(run.pid)[-1])
                os.kill(ranks[-1], signal.SIGKILL)
                begin_s = time.time()
                while {*children(agent)} & {*ranks}:
                    time.sleep(0.01)
                times["ended"] = time.time() - begin_s
            elif "started again by" in line:
                times["again"] = seconds
            elif "starting from" in line:
                times["resumed"] = seconds
            elif step and "resumed" in times:
                times.setdefault("step", seconds)
                if step > newest:
                    times["new step"] = seconds
                    run.kill()  # torchrun and its ranks end with it
    return times


def children(pid: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--processes", default="2,6")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(
        f"{'processes':<10}{'':<8}" + "".join(f"{column:>15}" for column in COLUMNS) + "   load"
    )
    for processes in map(int, options.processes.split(",")):
        found: dict[str, list[dict[str, float]]] = {tree: [] for tree in options.trees}
        loads: list[float] = []
        for tree in options.trees * options.rounds:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                path = Path(tree.partition("=")[2]).absolute()
                found[tree].append(measure(path, folder, processes=processes))
            loads.append(os.getloadavg()[0])
        for tree, runs in found.items():
            cells = (sorted(times[column] for times in runs) for column in COLUMNS)
            texts = (f"{statistics.median(cell):.1f} ({cell[-1]:.1f})" for cell in cells)
            name = f"{processes:<10}{tree.partition('=')[0]:<8}"
            load = f"   {min(loads):.0f} to {max(loads):.0f}"
            print(name + "".join(f"{text:>15}" for text in texts) + load, flush=True)


if __name__ == "__main__":
    main()
