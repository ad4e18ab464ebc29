"""Signals at random moments, most of them during a save; runs that end well, again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.runs import Run, same_tensors
from titan.checkpoint.manager import list_steps

SIGNALS, STEPS_PER_SIGNAL = 20, 40
RUNS_THAT_END_WELL = 100


def start(folder: Path, steps: int) -> Run:
    return Run(
        folder,
        "--nproc=2",
        f"--training.steps={steps}",
        "--training.local_batch_size=1",
        "--checkpoint.interval=1",  # half of the time goes into saving
        "--checkpoint.keep_latest_k=2",
    )


@pytest.mark.slow  # tests/health/test_chaos.py has one signal in every run of the tests
@pytest.mark.timeout(1800)
def test_a_signal_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Each stops the run with 75, its last step saved; what comes out at the end is what an undisturbed run gives."""
    seed = int(os.environ.get("TITAN_CHAOS_SEED", time.time_ns() % 10_000))
    dice, steps = random.Random(seed), SIGNALS * STEPS_PER_SIGNAL
    for name in ("calm", "struck"):
        (tmp_path / name).mkdir()
    assert start(tmp_path / "calm" / "run", steps).end() == 0
    folder = tmp_path / "struck" / "run"
    for _ in range(SIGNALS):
        run = start(folder, steps)
        try:
            run.wait_until_training(step=max(run.steps(), default=0) + 1)
            time.sleep(dice.uniform(0, 0.5))
            run.process.send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]))
            assert run.end() == 75, f"seed {seed}: {run.said()}"
        finally:
            run.kill()
        step = run.status()["step"]
        assert (run.status()["state"], run.status()["exit_code"]) == ("stopped", 75)
        assert max(list_steps(folder / "checkpoint")) == step, f"seed {seed}"
        assert run.steps() == list(range(1, step + 1)), f"seed {seed}"
    last = start(folder, steps)
    try:
        assert last.end() == 0, last.said()
    finally:
        last.kill()
    calm = tmp_path / "calm" / "run" / "checkpoint" / f"step-{steps}"
    assert same_tensors(calm, folder / "checkpoint" / f"step-{steps}"), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_end_well_exit_with_0(tmp_path: Path) -> None:
    """torch's gloo alone aborts about one in twenty of them while the interpreter is torn down."""
    codes = []
    for number in range(RUNS_THAT_END_WELL):
        run = Run(tmp_path / f"run-{number}", "--nproc=2", "--training.steps=2")
        try:
            codes.append(run.end())
        finally:
            run.kill()
        assert run.status()["state"] == "done"
    assert codes == [0] * RUNS_THAT_END_WELL
