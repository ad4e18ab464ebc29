"""titan/health/warm_start.py: a forked rank behaves as a started one, and goes on where a killed one was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.runs import Run, logged_rows, same_tensors

# A launcher whose ranks are this `run_rank`. Prints the exit codes of the ranks that argv names.
FORKS = """
import json, os, signal, sys, threading, types
from titan.health import warm_start
def run_rank():
    word = sys.argv[1]
    print(word, os.environ["RANK"], "TITAN_OLD" in os.environ, len(os.listdir("/proc/self/fd")), flush=True)
    if word == "raises":
        raise RuntimeError("its own words")
    os.kill(os.getpid(), int(word[1:])) if word[0] == "-" else os._exit(int(word))
sys.modules["titan.train"] = types.SimpleNamespace(run_rank=run_rank)
os.environ["TITAN_OLD"] = "of the launcher"
kept = open(os.devnull)  # the launcher's, which a rank must not inherit
os.set_inheritable(kept.fileno(), True)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: print("the launcher's handler"))
ranks = [
    warm_start._Rank((*warm_start._RANK, word), {"RANK": str(n)}, start_new_session=True)
    for n, word in enumerate(sys.argv[1:])
]
print(json.dumps([rank.wait() for rank in ranks]), warm_start.can_fork())
threading.Thread(target=signal.pause, daemon=True).start()
print(warm_start.can_fork())
"""
# Importing all that a rank needs, while the launcher has more threads for OpenMP than one, asks no accelerator.
PREPARES = """
import os, sys
sys.modules["torch"] = None  # whoever imports it without OMP_NUM_THREADS fails
from titan.health import warm_start
warm_start.prepare()
del sys.modules["torch"]
os.environ["OMP_NUM_THREADS"] = "8"
warm_start.prepare()
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
assert subprocess_handler.Popen is warm_start._Rank and warm_start.can_fork()
assert "titan.trainer" in sys.modules and not torch.cuda.is_initialized()
assert "OPENBLAS_NUM_THREADS" not in os.environ
"""


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if "NUM_THREADS" not in name}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment
    )


def test_a_fork_ends_as_a_program_does() -> None:
    words = ["0", "2", "75", "-9", "-15", "-1", "-10", "raises"]
    done = run_python(FORKS, *words)
    said = done.stdout.splitlines()
    # 0, 1, 2 and the one that lists them: no file of the launcher's.
    assert sorted(said[:-2]) == sorted(f"{word} {n} False 4" for n, word in enumerate(words)), done
    assert said[-2:] == ["[0, 2, 75, -9, -15, -1, -10, 1] True", "False"], done
    assert "RuntimeError: its own words" in done.stderr


def test_a_launcher_may_fork_after_its_imports() -> None:
    done = run_python(PREPARES)
    assert done.returncode == 0, done.stderr


def test_a_killed_rank_goes_on_as_an_undisturbed_run(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    settings = ("--nproc=2", "--training.steps=40", "--checkpoint.interval=5", "--max-restarts=1")
    calm = Run(tmp_path / "calm", *settings)
    assert calm.end() == 0, calm.said()
    run = start(*settings)
    run.wait_until_training(step=12)
    first = run.rank(0)
    os.kill(run.rank(1), signal.SIGKILL)
    run.wait_until(lambda: "started again by torchrun, 1 of 1 times" in run.said())
    # A fork has the command line of its launcher.
    commands = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (run.agent(), run.rank(0))}
    assert len(commands) == 1 and run.rank(0) != first
    assert run.end() == 0, run.said()
    rows = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in logged_rows(folder)]
        for folder in (calm.folder, run.folder)
    ]
    assert rows[0] == rows[1]
    last = "checkpoint/step-40"
    assert same_tensors(calm.folder / last, run.folder / last)
