"""A rank that dies, or hangs, ends the job in time, and the others say in which collective they missed it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Until the first steps; from the time limit to the end, of which torchrun gives a rank that hangs 30 to hear SIGTERM.
STUCK_S = 600  # a run that takes longer is stuck; no measure of speed
INIT_TIMEOUT_S = 30
FSDP = r"all_gather\w*|reduce_scatter\w*|all_reduce"
PP = f"{FSDP}|a send or receive between pipeline stages"
# What sets the layout on two ranks, and where the other rank may be found waiting.
LAYOUTS = {
    "FSDP2": ([], FSDP),
    "DDP": (["data_parallel_replicate_degree=2"], "all_reduce"),
    "TP": (["tensor_parallel_degree=2"], FSDP),
    "CP ring": (
        ["context_parallel_degree=2", "context_parallel_rotate_method=ring"],
        f"{FSDP}|all_?to_?all\\w*",
    ),
    "PP": (["pipeline_parallel_degree=2"], PP),  # see titan/parallel/shims.py for its time limit
}


class Job:
    """Two ranks under `titan train`; the victim is ended or stopped by `strike` once they train."""

    def __init__(self, folder: Path, *, settings: list[str], timeout_s: int) -> None:
        self.folder = folder
        self.messages = folder.parent / "stderr.txt"
        command = [sys.executable, "-m", "titan.cli", "train", "train_configs/debug_model.toml"]
        command += ["--nproc", "2", f"--job.dump_folder={folder}", "--training.dataset=synthetic"]
        command += [
            "--training.steps=1000000",
            "--training.seq_len=64",
            "--checkpoint.enable=false",
        ]
        command += [f"--comm.train_timeout_seconds={timeout_s}"]
        command += [f"--comm.init_timeout_seconds={INIT_TIMEOUT_S}"]
        command += [f"--parallelism.{setting}" for setting in settings]
        with self.messages.open("w") as messages:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=messages
            )

    def wait_until_training(self) -> None:
        metrics, deadline = self.folder / "metrics.jsonl", time.monotonic() + STUCK_S
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def strike(self, rank: int, number: signal.Signals) -> None:
        ranks = [pid for pid in self.processes() if f"RANK={rank}" in _environment(pid)]
        assert len(ranks) == 1
        os.kill(ranks[0], number)

    def processes(self) -> list[int]:
        """Whatever has the run folder on its command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:  # ended while we looked
                continue
            if str(self.folder).encode() in command and int(path.name) != os.getpid():
                found.append(int(path.name))
        return found

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def said(self) -> str:
        return self.messages.read_text()


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def start(layout: str, *, timeout_s: int) -> Job:
        settings = LAYOUTS[layout][0]
        jobs.append(Job(tmp_path / "run", settings=settings, timeout_s=timeout_s))
        jobs[-1].wait_until_training()
        return jobs[-1]

    yield start
    for job in jobs:
        for pid in job.processes():  # of a test that has failed
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def _check_end(job: Job, *, layout: str, survivor: int) -> None:
    assert job.process.wait(timeout=STUCK_S) == 1, job.said()
    assert not job.processes()
    status, operations = job.status(), LAYOUTS[layout][1]
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["step"] >= 3
    where = rf"rank {survivor} failed in step \d+ in ({operations})( of .*)? \((titan|models)/[\w/]+\.py:\d+, in \w+\): "
    assert re.match(where, status["reason"]), status["reason"]
    assert "\n" not in status["reason"]
    assert status["reason"] in job.said()
    assert status["reason"] in (job.folder / "logs" / f"rank-{survivor}.log").read_text()


QUICK = ("FSDP2", 1), ("TP", 1), ("PP", 0)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param(layout, victim, marks=[] if (layout, victim) in QUICK else pytest.mark.slow)
        for layout, victim in [*((layout, 1) for layout in LAYOUTS), ("FSDP2", 0), ("PP", 0)]
    ],
)
def test_a_killed_rank_ends_the_job(layout: str, victim: int, start: Any) -> None:
    job = start(layout, timeout_s=20)
    job.strike(victim, signal.SIGKILL)
    _check_end(job, layout=layout, survivor=1 - victim)
    assert re.search(rf"rank {victim} \(pid \d+\) was ended by SIGKILL", job.said())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hung_rank_ends_the_job_at_the_time_limit(layout: str, start: Any) -> None:
    job = start(layout, timeout_s=6)
    job.strike(1, signal.SIGSTOP)
    _check_end(job, layout=layout, survivor=0)
    assert re.search(r"[Tt]imed? ?out|timeout", job.status()["reason"])
