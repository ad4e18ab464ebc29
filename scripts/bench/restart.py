"""How long a run takes from `kill -9` of a rank to its next step: the debug model on this machine's CPU.

    python scripts/bench/restart.py --processes 2,6 --rounds 5 before=../older after=.

Each NAME=FOLDER is a checkout of titan; they take turns in each round, so that other load on the machine meets all alike. A run
trains until step 12, with a checkpoint every 5 steps, and the last rank is killed. Seconds since the kill, medians and, in
parentheses, the worst:

    ended      no rank of the killed attempt is left
    again      rank 0 of the next attempt says so: it has read its config, and has not imported torch yet
    resumed    the ranks have met, built the model and are about to load the checkpoint
    step       the first step of the next attempt has its row in metrics.jsonl
    new step   the first step that no attempt has trained before has its row

"first" are seconds from the command to step 1, before anything is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("first", "ended", "again", "resumed", "step", "new step")
KILL_AT, INTERVAL = 12, 5


def measure(tree: Path, folder: Path, *, processes: int) -> dict[str, float]:
    """Return the seconds of each column of one run."""
    command = [sys.executable, "-m", "titan.cli", "train", "train_configs/debug_model.toml"]
    command += [f"--job.dump_folder={folder}", "--model.flavor=tiny", "--training.seq_len=32"]
    command += ["--training.dataset=synthetic", "--training.steps=1000000"]
    command += ["--checkpoint.enable=true", f"--checkpoint.interval={INTERVAL}"]
    command += ["--nproc", str(processes), "--max-restarts", "3"]
    begin_s = time.time()
    run = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[tuple[float, str]] = []
    lines = run.stdout or ()
    threading.Thread(
        target=lambda: said.extend((time.time(), line) for line in lines), daemon=True
    ).start()

    def rows() -> list[dict[str, Any]]:
        path = folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait(found: Callable[[], Any]) -> Any:
        while not (result := found()):
            if run.poll() is not None:
                raise SystemExit("".join(line for _, line in said))
            time.sleep(0.02)
        return result

    def first(since_s: float, *, after: int = 0) -> float | None:
        times = (r["unix_s"] for r in rows() if r["unix_s"] > since_s and r["step"] > after)
        return next(times, None)

    def when(words: str) -> float | None:
        return next((time_s for time_s, line in said if words in line), None)

    try:
        times = {"first": wait(lambda: first(0)) - begin_s}
        wait(lambda: rows()[-1]["step"] >= KILL_AT)
        ranks = children(children(run.pid)[-1])
        newest = rows()[-1]["step"]
        os.kill(ranks[-1], signal.SIGKILL)
        killed_s = time.time()
        wait(lambda: not any(is_alive(rank) for rank in ranks))
        times["ended"] = time.time() - killed_s
        times["new step"] = wait(lambda: first(killed_s, after=newest)) - killed_s
        times["step"] = wait(lambda: first(killed_s)) - killed_s
        for column, words in (("again", "started again by"), ("resumed", "starting from")):
            times[column] = wait(lambda words=words: when(words)) - killed_s
    finally:
        for pid in (*children(run.pid), run.pid):  # the ranks end with torchrun
            os.kill(pid, signal.SIGKILL)
        run.wait()
    return times


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--processes", default="2,6")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = {
        name: Path(path).absolute() for name, _, path in (t.partition("=") for t in options.trees)
    }
    print(f"{'processes':<10}{'':<8}" + "".join(f"{column:>15}" for column in COLUMNS) + "   load", flush=True)  # fmt: skip
    for processes in map(int, options.processes.split(",")):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        loads: list[float] = []
        for _ in range(options.rounds):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[name].append(measure(tree, Path(folder) / "run", processes=processes))
                loads.append(os.getloadavg()[0])
        for name, times in found.items():
            cells = (sorted(row[column] for row in times) for column in COLUMNS)
            texts = (f"{statistics.median(cell):.1f} ({cell[-1]:.1f})" for cell in cells)
            load = f"{min(loads):.0f} to {max(loads):.0f}"
            print(f"{processes:<10}{name:<8}" + "".join(f"{text:>15}" for text in texts) + f"   {load}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
