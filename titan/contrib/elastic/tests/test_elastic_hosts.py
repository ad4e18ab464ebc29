"""Replica groups on machines of their own: two network namespaces with a group each, which is killed and comes back."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.hosts import Hosts, run, why_not
from tests.support.runs import logged_steps
from titan.contrib.elastic.tests.test_elastic import JOB, ROOT, drill, needs_torchft

pytestmark = [needs_torchft, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

# One schedule, whenever a run ends, and a rate at which rounding errors do not grow over thousands of steps.
RATE = ("--lr_scheduler.total_steps=100000", "--optimizer.lr=1e-5")


class Groups:
    """Two hosts with a group each, and a lighthouse that both reach."""

    def __init__(self, folder: Path, *settings: str) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self.settings = folder, settings
        self.hosts = Hosts(2, name="ft", subnet="10.79.3")
        limits = {"min_replicas": 1, "join_timeout_ms": 20_000, "heartbeat_timeout_ms": 2000}
        self.lighthouse: Any = LighthouseServer(bind="0.0.0.0:0", **limits)
        port = self.lighthouse.address().rpartition(":")[2]
        self.address = f"http://{self.hosts.subnet}.254:{port}"
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, *settings: str) -> None:
        section = {"enable": "true", "replica_groups": 2, "replica_id": number}
        section["lighthouse"] = self.address
        command = [sys.executable, "-m", "titan.cli", "train", *JOB, "--nproc", "1"]
        command += [f"--fault_tolerance.{key}={value}" for key, value in section.items()]
        command += [f"--job.dump_folder={self.folder}/group-{number}"]
        command += [f"--checkpoint.folder={self.folder}/saved", *self.settings, *settings]
        with (self.folder / f"group-{number}.log").open("a") as log:
            self.processes[number] = subprocess.Popen(
                self.hosts.on(number + 1, command),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def kill(self, number: int) -> None:
        """Kill all processes of a host. Unlike in a power cut, the kernel closes their connections."""
        for pid in self.hosts.processes(number + 1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[number].wait()

    def text(self, number: int) -> str:
        return (self.folder / f"group-{number}.log").read_text()

    def row(self, number: int) -> dict[str, Any]:
        """Return the last step of a group."""
        rows = [row for row in drill.rows_of(self.folder) if row["group"] == f"group-{number}"]
        return rows[-1] if rows else {"step": 0, "replica_groups": 0}

    def wait_for(self, what: Callable[[], Any], *, within_s: float = 120) -> float:
        """Return the seconds until something holds. Fails if a group has ended."""
        began_s = time.monotonic()
        while not what():
            late = time.monotonic() - began_s > within_s
            ended = [n for n, process in self.processes.items() if process.poll() is not None]
            assert not ended and not late, (ended, self.text(0)[-1500:], self.text(1)[-1500:])
            time.sleep(0.1)
        return time.monotonic() - began_s

    def close(self) -> None:
        self.hosts.close()
        for process in self.processes.values():
            process.wait()
        self.lighthouse.shutdown()


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    made = Groups(tmp_path, *RATE, "--training.steps=100000", "--checkpoint.interval=100000")
    yield made
    made.close()


def kill_and_return(groups: Groups, kills: int, *, seed: int) -> None:
    """Kill one of the groups at a random moment, sometimes again while it returns; the other one always goes on."""
    chosen, waits, returns = random.Random(seed), [], []
    for number in (0, 1):
        groups.start(number)
    groups.wait_for(lambda: groups.row(0)["replica_groups"] == 2)
    while kills:
        lost = chosen.randrange(2)
        other = 1 - lost
        time.sleep(chosen.uniform(0, 2))
        for _ in range(1 + (kills > 1 and chosen.random() < 0.4)):
            groups.kill(lost)
            kills -= 1
            groups.processes.pop(lost)
            before = groups.row(other)["step"]
            waits.append(groups.wait_for(lambda n=other, at=before: groups.row(n)["step"] > at + 2))
            groups.start(lost)
            time.sleep(chosen.uniform(0, 6))
        before = groups.row(other)["step"]
        returns.append(
            groups.wait_for(
                lambda at=before: all(
                    groups.row(n)["replica_groups"] == 2 and groups.row(n)["step"] > at
                    for n in (0, 1)
                )
            )
        )
    print(f"next steps {sorted(waits)}, median {median(waits):.1f}; returns {sorted(returns)}")
    require_equal_to_one_process(groups)


def require_equal_to_one_process(groups: Groups) -> None:
    steps = min(groups.row(n)["step"] for n in (0, 1))
    for number in (0, 1):
        groups.kill(number)
    # Every step is that of one process, so whoever came back has the weights of the other.
    options = argparse.Namespace(steps=steps, seq_len=64, more=RATE)
    assert drill.replay(groups.folder, options) < drill.BOUND


@pytest.mark.parametrize("is_cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_silent_host_costs_the_seconds_that_the_lighthouse_needs(
    groups: Groups, is_cut: bool
) -> None:
    """It does not cost the minute that a sum may take, and its group comes back without a restart."""

    def signal_all(number: signal.Signals) -> None:
        for pid in groups.hosts.processes(2):
            os.kill(pid, number)

    for number in (0, 1):
        groups.start(number)
    groups.wait_for(lambda: groups.row(0)["replica_groups"] == 2)
    groups.hosts.cut(2) if is_cut else signal_all(signal.SIGSTOP)
    before = groups.row(0)["step"]
    groups.wait_for(lambda: groups.row(0)["step"] > before + 2, within_s=30)
    assert "a replica group was lost (group-1 fell silent)" in groups.text(0)
    groups.hosts.mend(2) if is_cut else signal_all(signal.SIGCONT)
    before = groups.row(0)["step"]
    groups.wait_for(lambda: groups.row(1)["step"] > before + 2, within_s=30)
    assert groups.row(1)["replica_groups"] == 2
    require_equal_to_one_process(groups)


@pytest.mark.slow
def test_of_groups_that_reach_only_the_lighthouse_the_lowest_goes_on(groups: Groups) -> None:
    for number in (0, 1):
        groups.start(number, "--fault_tolerance.process_group_timeout_ms=5000")
    groups.wait_for(lambda: groups.row(0)["replica_groups"] == 2)
    nobody = f"{groups.hosts.subnet}.2 lladdr 00:00:00:00:00:01 dev eth0 nud permanent"
    run("ip", "-n", "ft1", "neigh", "replace", *nobody.split())
    assert groups.processes.pop(1).wait(timeout=120) == 1
    before = groups.row(0)["step"]
    groups.wait_for(lambda: groups.row(0)["step"] > before + 2)
    last = groups.text(1).strip().splitlines()[-1]
    assert "group-0, group-1 reach the lighthouse, but not each other" in last, last
    assert "group-1 ends, so that group-0 goes on" in last and "Traceback" not in groups.text(1)


def test_a_group_on_a_machine_of_its_own_comes_back(groups: Groups) -> None:
    kill_and_return(groups, 2, seed=0)
    assert logged_steps(groups.folder / "group-0")


@pytest.mark.slow
def test_twenty_kills_at_random_moments(groups: Groups) -> None:
    kill_and_return(groups, 20, seed=1)
