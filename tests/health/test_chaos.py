"""A signal, then kill -9 at random moments, again and again: what comes out is bit for bit what an undisturbed run gives.

TITAN_CHAOS_SEED repeats a run's moments, as far as a machine's own timing allows.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.runs import Run, same_tensors
from titan.checkpoint.manager import list_steps
from titan.checkpoint.manifest import find_damage

STEPS_PER_KILL = 100
INTERVAL = 6
MODES = ("disabled", "async", "async_with_pinned_mem")
VICTIMS = ("rank 0", "rank 1", "all ranks", "agent")


def start(folder: Path, *, steps: int, mode: str) -> Run:
    return Run(
        folder,
        "--nproc=2",
        f"--training.steps={steps}",
        "--training.local_batch_size=1",
        f"--checkpoint.async_mode={mode}",
        f"--checkpoint.interval={INTERVAL}",
        "--checkpoint.keep_latest_k=0",
        "--comm.train_timeout_seconds=20",
    )


def strike(run: Run, victim: str) -> None:
    pids = {
        "rank 0": lambda: [run.rank(0)],
        "rank 1": lambda: [run.rank(1)],
        "all ranks": lambda: [run.rank(0), run.rank(1)],
        "agent": lambda: [run.agent()],
    }[victim]()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("async_with_pinned_mem", 2),
        *(pytest.param(mode, 34, marks=pytest.mark.slow) for mode in MODES),
    ],
)
@pytest.mark.timeout(3600)
def test_nothing_is_lost(tmp_path: Path, mode: str, kills: int) -> None:
    seed = int(os.environ.get("TITAN_CHAOS_SEED", time.time_ns() % 10_000))
    dice, steps = random.Random(seed), kills * STEPS_PER_KILL
    for name in ("calm", "chaos"):
        (tmp_path / name).mkdir()
    calm = start(tmp_path / "calm" / "run", steps=steps, mode=mode)
    assert calm.end() == 0, calm.said()
    folder, committed, struck = tmp_path / "chaos" / "run", set[int](), []
    while True:
        run = start(folder, steps=steps, mode=mode)
        try:
            done = max(run.steps(), default=0)
            if len(struck) == kills:
                assert run.end() == 0, run.said()
                break
            run.wait_until_training(step=min(done + 1, steps - 1))
            time.sleep(dice.uniform(0, 0.8))
            if struck:
                victim = dice.choice(VICTIMS)
                strike(run, victim)
            else:
                victim = "a signal"
                run.process.send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]))
            struck.append(f"{victim} at step {max(run.steps(), default=0)}")
            code = run.end()
            if victim == "a signal":
                status = run.status()
                assert (code, status["state"], status["exit_code"]) == (75, "stopped", 75), (
                    struck
                )
                assert max(list_steps(folder / "checkpoint")) == status["step"], f"seed {seed}"
        finally:
            run.kill()
        now = set(list_steps(folder / "checkpoint"))
        assert committed <= now, f"lost {sorted(committed - now)}; seed {seed}: {struck}"
        committed = now
    said = run.said()
    assert len(re.findall("starting from", said)) >= 1, said
    moments = f"seed {seed}: {struck}"
    for step in list_steps(folder / "checkpoint"):
        assert find_damage(folder / "checkpoint" / f"step-{step}") == [], moments
    assert run.steps() == list(range(1, steps + 1)), (
        moments
    )  # each step, and so each token, once
    positions = [
        json.loads((path / "checkpoint" / f"step-{steps}" / "titan.json").read_text())["data"]
        for path in (calm.folder, folder)
    ]
    assert positions[0] == positions[1], moments
    last = f"checkpoint/step-{steps}"
    assert same_tensors(calm.folder / last, folder / last), moments
