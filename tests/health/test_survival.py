"""Signals, restarts, killed agents and hangs: how a run ends, and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Run
from tests.support.tables import table
from titan.checkpoint.manager import list_steps
from titan.ops.doctor.diagnosis import diagnose
from titan.ops.doctor.evidence import Evidence

HANGING = f"-m titan.ops.launch --standalone --nproc-per-node=2 {Path(__file__).with_name('hanging_train.py')}".split()
Start = Callable[..., Run]


def assert_ranks_ended_by_themselves(run: Run) -> None:
    """And were not killed by torchrun, which waits 30 seconds first."""
    [launch] = (run.folder / "logs").glob("launch-*.json")
    codes = [rank["exit_code"] for rank in json.loads(launch.read_text())["ranks"].values()]
    assert codes and -signal.SIGKILL not in codes, codes


# ---- signals ---------------------------------------------------------------------------------------


def test_a_signal_during_the_import_of_torch(start: Start) -> None:
    run = start("--training.steps=1000")
    run.wait_until(
        (run.folder / "lock.json").exists
    )  # handlers are installed, torch comes next
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 75, run.said()
    assert (run.status()["state"], run.status()["exit_code"]) == ("stopped", 75)
    assert list_steps(run.folder / "checkpoint") == [run.status()["step"]] == [1]
    assert not (run.folder / "lock.json").exists()


def test_a_killed_rank_is_restarted_and_four_signals_stop_the_run_once(start: Start) -> None:
    settings = ("--training.steps=100000", "--checkpoint.interval=5", "--max-restarts=2")
    run = start(*settings, "--nproc=2")
    run.wait_until_training(step=7)
    os.kill(run.rank(0), signal.SIGKILL)
    run.wait_until(lambda: "started again by torchrun, 1 of 2 times" in run.said())
    # The other rank says where it missed it: in a collective of its step, or of a save.
    missed = r"rank 1 failed in step \d+ in \w.* \((titan|models)/[\w/]+\.py:\d+, in \w+\): "
    assert re.search(missed, run.said()), run.said()
    newest = max(run.steps())
    run.wait_until_training(step=newest + 1)
    ranks = [run.rank(0), run.rank(1)]
    for number in (signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGTERM):
        for pid in ranks:  # as schedulers do, beside torchrun's own
            os.kill(pid, number)
    assert run.end() == 75, run.said()
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert max(list_steps(run.folder / "checkpoint")) == status["step"]
    assert run.steps() == list(range(1, status["step"] + 1))
    assert f"starting from {run.folder}/checkpoint/step-" in run.said()
    assert run.said().count("started again") == 1  # after the kill, and not after the signals


def test_a_signal_in_a_collective_that_never_ends(start: Start) -> None:
    run = start("--fault_tolerance.grace_seconds=3", program=HANGING, HANG="data")
    run.wait_until_training()
    ranks = [run.rank(0), run.rank(1)]
    time.sleep(1)  # rank 0 waits for rank 1
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    assert run.end() == 1
    assert_ranks_ended_by_themselves(run)
    status, said = run.status(), run.said()
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 3)
    asked_to_stop = r"SIGTERM asked rank {} to stop, but fault_tolerance.grace_seconds = 3 are over: it is in {}"
    waits = asked_to_stop.format(0, r"\w+.* \((titan|models)/[\w/]+\.py:\d+, in \w+\)")
    sleeps = asked_to_stop.format(1, r"hang \(titan/run/trainer\.py:\d+, in train_one_step\)")
    assert re.search(f"{waits}|{sleeps}", status["reason"]), status
    assert re.search(sleeps, said) and re.search(waits, said), said
    for rank in (0, 1):
        stacks = (run.folder / "logs" / f"rank-{rank}.stacks.txt").read_text()
        assert f"asked rank {rank} to stop" in stacks and "in train_one_step" in stacks
    assert not run.processes()


def test_ctrl_c_is_answered_once_and_a_second_one_says_what_is_lost(start: Start) -> None:
    run = start("--checkpoint.interval=1", program=HANGING, HANG="data")
    run.wait_until_training()
    for text in ("stopping after this step and saving; Ctrl-C again", " lost"):
        for pid in (run.rank(0), run.rank(1)):
            os.kill(pid, signal.SIGINT)
        run.wait_until(lambda text=text: text in run.said())
    run.end()
    assert_ranks_ended_by_themselves(run)
    status, said = run.status(), run.said()
    assert (status["state"], status["exit_code"]) == ("stopped", 130)
    assert said.count("stopping") == said.count("lost") == 1 and "Traceback" not in said, said
    assert "ended without saving: 1 step since step-2 is lost" in said


# ---- shells ----------------------------------------------------------------------------------------

SHELLS = table(__file__, "shells")


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_may_do(shell: str, start: Start) -> None:
    script, code, said = SHELLS[shell]
    run = start("--training.steps=3", before=("bash", "-c", script, "-"))
    assert run.end() == code and said in run.said()
    assert code or run.status()["state"] == "done"


# ---- killed processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victim", ["torchrun", pytest.param("titan train", marks=pytest.mark.slow)]
)
def test_no_rank_outlives_its_agent(victim: str, start: Start) -> None:
    run = start("--training.steps=100000", "--nproc=2")
    run.wait_until_training()
    os.kill(run.agent() if victim == "torchrun" else run.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and run.processes():
        time.sleep(0.05)
    assert not run.processes()
    if victim == "torchrun":
        assert run.end() == 1 and "was ended by SIGKILL" in run.said().splitlines()[-1]
        assert run.status()["state"] == "failed" and run.status()["step"] >= 2
        assert [found.kind for found in diagnose(Evidence(run.folder)).findings] == ["killed"]


def test_status_says_failed_where_no_rank_lived_to_say_so(start: Start) -> None:
    run = start("--training.steps=100000", "--nproc=2")
    run.wait_until_training()
    ranks = [run.rank(0), run.rank(1)]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: neither sees the other die
        for pid in ranks:
            os.kill(pid, number)
    assert run.end() == 1, run.said()
    status = run.status()
    assert (status["state"], status["exit_code"]) == ("failed", 1), status
    assert all(f"(pid {pid}) was ended by SIGKILL" in status["reason"] for pid in ranks), status


# ---- hangs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hang",
    ["data", *(pytest.param(hang, marks=pytest.mark.slow) for hang in ("locked", "stopped"))],
)
def test_a_hung_step_ends_the_run_and_names_the_rank(hang: str, start: Start) -> None:
    limits = ("--fault_tolerance.step_timeout_seconds=4", "--comm.init_timeout_seconds=60")
    run = start(*limits, program=HANGING, HANG="" if hang == "stopped" else hang)
    run.wait_until_training()
    if hang == "stopped":
        os.kill(run.rank(1), signal.SIGSTOP)
    assert run.end() == 1
    status = run.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("hung", 1, 3), status
    culprit = {
        "data": r"rank 1 is in hang \(titan/run/trainer\.py:\d+, in train_one_step\)",
        "locked": r"rank 1 does not answer \(stopped, or its interpreter is locked\)",
        "stopped": r"rank 1 does not answer \(stopped, or its interpreter is locked\)",
    }[hang]
    waiting = r"rank 0 waits in \w+.* \((titan|models)/[\w/]+\.py:\d+, in \w+\)"
    assert re.search(rf"step 3 hangs: .* 4 s; {culprit}; {waiting}\. Stacks", status["reason"])
    assert_ranks_ended_by_themselves(run)
    stacks = [(run.folder / "logs" / f"rank-{n}.stacks.txt").read_text() for n in (0, 1)]
    assert "in train_one_step" in stacks[0]
    assert "hanging_train.py" in stacks[1]  # a stopped rank was woken to write it
    assert not run.processes()
