"""titan/ops/warm_start.py: a forked rank behaves as a started one, and goes on where a killed one was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.runs import Run, logged_rows, same_tensors

# A launcher with handlers, a variable and an open file, and a rank for each word of argv. Prints their exit codes.
FORKS = """
import os, signal, sys, threading, types
from titan.ops import warm_start
def run_rank():
    word = sys.argv[1]
    files = len(os.listdir("/proc/self/fd"))
    status = open("/proc/self/status").read()
    ignored, blocked = (status.partition(key)[2].split()[0] for key in ("SigIgn:", "SigBlk:"))
    os.write(1, f"{word} {os.environ['RANK']} {'OLD' in os.environ} {files} {ignored} {blocked}\\n".encode())
    if word == "raises":
        raise RuntimeError("its own words")
    os.kill(os.getpid(), int(word[1:])) if word[0] == "-" else os._exit(int(word))
sys.modules["titan.train"] = types.SimpleNamespace(run_rank=run_rank)
os.environ["OLD"] = "the launcher's"
os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: print("the launcher's"))
ranks = [warm_start._Rank((*warm_start._RANK, w), {"RANK": str(n)}) for n, w in enumerate(sys.argv[1:])]
print([rank.wait() for rank in ranks], warm_start.can_fork())
threading.Thread(target=signal.pause, daemon=True).start()
print(warm_start.can_fork())
"""
# What a started program ignores and blocks.
SIGNALS = """
status = open("/proc/self/status").read()
print(*(status.partition(key)[2].split()[0] for key in ("SigIgn:", "SigBlk:")))
"""
# A program that is started with other signals ignored and blocked: the words of argv are these two sets and the program's.
STARTED_WITH = """
import json, os, signal, sys
for number in json.loads(sys.argv[1]):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, json.loads(sys.argv[2]))
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[3:]])
"""
# All that a rank imports leaves one thread, where OpenMP and OpenBLAS may have several.
PREPARES = """
import os, sys
from titan.ops import warm_start
os.environ["OMP_NUM_THREADS"] = "8"
warm_start.prepare()
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
assert subprocess_handler.Popen is warm_start._Rank and "titan.run.trainer" in sys.modules
assert warm_start.can_fork() and "OPENBLAS_NUM_THREADS" not in os.environ
"""


def run_python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    def answer_all() -> None:  # whatever this process ignores
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)

    return finished([sys.executable, "-c", program, *words], preexec_fn=answer_all, code=None)


def test_a_fork_ends_as_a_program_does() -> None:
    words = [
        "0",
        "2",
        "75",
        "-9",
        "-15",
        "-12",
        "-10",
        "raises",
    ]  # none that nohup or a shell ignores
    done = run_python(FORKS, *words)
    said = done.stdout.splitlines()
    # 0, 1, 2 and the one that lists them: no file of the launcher's. And a program's signals: SIGPIPE kills none.
    signals = run_python(SIGNALS).stdout.strip()
    expected = sorted(f"{word} {n} False 4 {signals}" for n, word in enumerate(words))
    assert sorted(said[:-2]) == expected, done
    assert said[-2:] == ["[0, 2, 75, -9, -15, -12, -10, 1] True", "False"], done
    assert "RuntimeError: its own words" in done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_a_fork_has_the_signals_of_a_started_program(seed: int) -> None:
    """Whatever its launcher was started with, and has handlers for."""
    drawn = random.Random(seed)
    # Nothing can wait for children whose end is ignored.
    every = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})
    sets = [
        json.dumps([*drawn.sample([*map(int, every)], 8), drawn.choice((1, 10, 15))])
        for _ in range(2)
    ]
    program = run_python(STARTED_WITH, *sets, SIGNALS)
    fork = run_python(STARTED_WITH, *sets, FORKS, "0")
    expected = f"0 0 False 4 {program.stdout.strip()}"
    assert fork.stdout.splitlines()[0] == expected, (sets, fork)


def test_a_run_ignores_every_signal_that_its_launcher_was_started_to_ignore(
    start: Callable[..., Run],
) -> None:
    """Real-time signals have no names. What titan handles, and faults, whose stacks ranks write, are handled all the same."""
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2} | faults
    unusable = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    ignored = sorted(map(int, signal.valid_signals() - handled - unusable))
    ignoring = "import os, signal, sys; a = sys.argv; n = int(a[1])\n" + (
        "for s in range(1, 65):\n    n >> s - 1 & 1 and signal.signal(s, signal.SIG_IGN)\nos.execvp(a[2], a[2:])"
    )
    mask = sum(1 << number - 1 for number in ignored)
    before = (sys.executable, "-c", ignoring, str(mask))
    run = start("--nproc=2", "--training.steps=30", before=before)
    run.wait_until_training(step=3)
    status = Path(f"/proc/{run.rank(1)}/status").read_text()
    assert int(status.partition("SigIgn:")[2].split()[0], 16) & mask == mask
    assert run.end() == 0, run.said()


def test_a_run_under_nohup_outlives_its_terminal(start: Callable[..., Run]) -> None:
    """Terminals send SIGHUP to the group of processes that they have started."""
    run = start("--nproc=2", "--training.steps=30", before=("setsid", "nohup"))
    run.wait_until_training(step=3)
    os.killpg(os.getpgid(run.agent()), signal.SIGHUP)
    assert run.end() == 0, run.said()
    assert [row["step"] for row in logged_rows(run.folder)][-1] == 30


def test_a_launcher_may_fork_after_its_imports() -> None:
    done = run_python(PREPARES)
    assert done.returncode == 0, done.stderr


def test_a_killed_rank_goes_on_as_an_undisturbed_run(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    settings = (
        "--nproc=2",
        "--training.steps=40",
        "--checkpoint.interval=5",
        "--max-restarts=1",
    )
    calm = Run(tmp_path / "calm", *settings)
    assert calm.end() == 0, calm.said()
    run = start(*settings)
    run.wait_until_training(step=12)
    os.kill(run.rank(1), signal.SIGKILL)
    run.wait_until(lambda: "started again by torchrun, 1 of 1 times" in run.said())
    # A fork has the command line of its launcher.
    commands = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (run.agent(), run.rank(0))}
    assert len(commands) == 1
    assert run.end() == 0, run.said()
    for a, b in zip(logged_rows(calm.folder), logged_rows(run.folder), strict=True):
        assert all(a[key] == b[key] for key in ("step", "loss", "grad_norm")), (a, b)
    last = "checkpoint/step-40"
    assert same_tensors(calm.folder / last, run.folder / last)


def test_a_fork_closes_what_is_open_and_tries_no_number_that_is_not() -> None:
    """With a limit of 2^30 files, as in containers, each number in turn would take minutes where there is no close_range."""
    program = """
import os, resource
from titan.ops import warm_start
os.closerange = None
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
os.dup2(files[0], 4095)
warm_start.close_inherited()
print([n for n in range(4096) if os.path.exists(f"/proc/self/fd/{n}")])
"""
    done = run_python(program)
    assert done.stdout.strip() == "[0, 1, 2]", done.stderr


def test_compile_workers_outlive_the_signals_that_stop_a_run() -> None:
    """Each process below this one gets what srun sends to all of a step; then they still compute."""
    program = """
import os, pathlib, signal, sys
from torch._inductor import async_compile
from titan.parallel.torch_compat import start_compile_workers
async_compile.has_triton_package = async_compile._process_pool_allowed = lambda: True
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
start_compile_workers()
pool = async_compile.AsyncCompile.process_pool()
assert pool.submit(os.getpid).result() != os.getpid()
parents = {}
for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    pid, _, rest = path.read_text().rpartition(")")
    parents[int(pid.split()[0])] = int(rest.split()[1])
below = {os.getpid()}
while more := {pid for pid, parent in parents.items() if parent in below} - below:
    below |= more
assert len(below) >= 3, below
for number in (signal.SIGTERM, signal.SIGUSR1):
    for pid in below - {os.getpid()}:
        os.kill(pid, number)
print("still", pool.submit(abs, -7).result(timeout=60))
sys.stdout.flush()
os._exit(0)
"""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    done = run_python(program)
    assert "still 7" in done.stdout, done.stderr[-2000:]
