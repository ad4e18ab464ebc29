"""A run in processes of its own, that a test watches and strikes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.support.jobs import ROOT
from titan.checkpoint.manager import load, stored_shapes

CLI = ["-m", "titan.cli", "train"]
# How long a test waits for an event before it calls the run stuck: never a measure of speed.
STUCK_S = 600


def logged_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, without one that is being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def logged_steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in logged_rows(folder)]


def numbers(folder: Path) -> list[tuple[float, ...]]:
    """Return the figures of each logged step that follow from its job."""
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    return [tuple(row[name] for name in names) for row in logged_rows(folder)]


def saved_tensors(step_folder: Path, *, rng: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, with `rng` also generators' states, which are bytes of a rank."""
    stored = stored_shapes(step_folder).items()
    shapes = {name: form for name, form in stored if rng or not name.startswith("rng.")}
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    load(step_folder, state)
    return state


def same_tensors(a: Path, b: Path) -> bool:
    """Return whether two checkpoints hold the same bits."""
    expected, saved = saved_tensors(a), saved_tensors(b)
    assert expected.keys() == saved.keys()
    return all(torch.equal(expected[name], saved[name]) for name in expected)


def errors(folder: Path, whole: Path) -> dict[str, float]:
    """Return the largest relative difference of the rows, and of what the last checkpoints hold."""
    assert [row[0] for row in numbers(folder)] == [row[0] for row in numbers(whole)]
    rows = zip(numbers(folder), numbers(whole), strict=True)
    pairs = [pair for mine, other in rows for pair in zip(mine, other, strict=True)]
    found = {"rows": max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)}
    name = f"checkpoint/step-{numbers(whole)[-1][0]}"
    ours, theirs = saved_tensors(folder / name), saved_tensors(whole / name)
    assert ours.keys() == theirs.keys()
    found["saved"] = max(relative_error(ours[key], theirs[key]) for key in theirs)
    return found


def relative_error(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine - other).float().norm() / other.float().norm().clamp(min=1e-12))


class Run:
    """The debug model, made smaller, in `folder`; `program` is what Python runs, and `before` the words before it."""

    def __init__(
        self,
        folder: Path,
        *settings: str,
        program: list[str] = CLI,
        before: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.folder, self.messages = folder, folder.parent / "messages.txt"
        command = [*before, sys.executable, *program, "train_configs/debug_model.toml"]
        command += [f"--job.dump_folder={folder}", "--training.dataset=synthetic"]
        command += [
            "--model.overrides.n_layers=2",
            "--training.seq_len=32",
            "--metrics.log_freq=1",
        ]
        environment = dict(os.environ) | variables
        with self.messages.open("a") as messages:
            self.process = subprocess.Popen(
                [*command, *settings],
                cwd=ROOT,
                stdout=messages,
                stderr=messages,
                env=environment,
            )

    def wait_until(self, ready: Callable[[], bool], *, within_s: float = STUCK_S) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait_until_training(self, *, step: int = 2) -> None:
        self.wait_until(lambda: bool(self.steps()) and self.steps()[-1] >= step)

    def end(self, *, within_s: float = STUCK_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout=within_s)

    def steps(self) -> list[int]:
        return logged_steps(self.folder)

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def said(self) -> str:
        return self.messages.read_text()

    def processes(self) -> list[int]:
        """Whatever has the run folder on its command line, zombies left out."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command, stat = (path / "cmdline").read_bytes(), (path / "stat").read_text()
            except OSError:  # ended while we looked
                continue
            alive = stat.rpartition(")")[2].split()[0] not in "ZX"
            if alive and str(self.folder).encode() in command and int(path.name) != os.getpid():
                found.append(int(path.name))
        return found

    def rank(self, number: int) -> int:
        """A rank's process id."""
        [pid] = [p for p in self.processes() if _is_rank(p, number)]
        return pid

    def agent(self) -> int:
        """torchrun's process id, in `titan train --nproc`."""
        return int(Path(f"/proc/{self.rank(0)}/stat").read_text().rpartition(")")[2].split()[1])

    def kill(self) -> None:
        """Kill what is left of it, and wait for its end."""
        while alive := self.processes():  # a rank may end after its launcher
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()


def _is_rank(pid: int, number: int) -> bool:
    """By its name, or if it started cold, by its environment."""
    try:
        name, environment = (
            Path(f"/proc/{pid}/{file}").read_text(errors="replace")
            for file in ("comm", "environ")
        )
    except OSError:
        return False
    return name == f"titan rank {number}\n" or f"\0RANK={number}\0" in environment
