"""torchrun on one node, under signals, without Slurm: titan.cluster.node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan.cluster import node

ROOT = Path(__file__).parents[2]
TRAIN = ["train_configs/debug_model.toml", "--training.dataset=synthetic", "--training.seq_len=32"]


def start(folder: Path, *settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "titan.cluster.node", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "titan.train", *TRAIN, f"--job.dump_folder={folder}", *settings]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.parametrize(
    "whom", ["only torchrun", pytest.param("all processes", marks=pytest.mark.slow)]
)
def test_a_signal_is_left_to_the_ranks(tmp_path: Path, whom: str) -> None:
    """Kubernetes signals the first process only, Slurm all of them, several times; either way the ranks save, and it ends with 75."""
    number = signal.SIGUSR1 if whom == "all processes" else signal.SIGTERM
    agent = start(tmp_path / "run", "--model.overrides.n_layers=2", "--metrics.log_freq=1")
    try:
        deadline, metrics = time.monotonic() + 120, tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        told = node.ranks_of(agent.pid) if whom == "all processes" else []
        assert len(told) in (0, 2)
        for pid in [agent.pid, *told] * 2:
            os.kill(pid, number)
        said = agent.communicate(timeout=60)[0]
    finally:
        agent.kill()
    assert (agent.returncode, f"stopped by {number.name} after step" in said) == (75, True), said


def test_a_signal_before_there_are_ranks(tmp_path: Path) -> None:
    for number, code in ((signal.SIGUSR1, 75), (signal.SIGTERM, 143)):
        agent = start(tmp_path / "run")
        try:
            caught = 0
            while not caught & (1 << (number - 1)):  # its handler is there, torch is not
                assert agent.poll() is None
                status = Path(f"/proc/{agent.pid}/status").read_text()
                caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            agent.send_signal(number)
            assert agent.wait(timeout=30) == code
        finally:
            agent.kill()
    assert not (tmp_path / "run").exists()


def test_a_mistake(tmp_path: Path) -> None:
    agent = start(tmp_path / "run", "--training.step=3")
    said = agent.communicate(timeout=60)[0]
    assert (agent.returncode, said.count("did you mean 'steps'?")) == (2, 1), said


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["--rdzv-endpoint=n1:29500"], {}, ("n1", 29500)),
        (["--rdzv-endpoint=[fe80::1]:29500"], {}, ("fe80::1", 29500)),
        ([], {"PET_MASTER_ADDR": "n2", "PET_MASTER_PORT": "5"}, ("n2", 5)),
        (["--standalone"], {}, None),
    ],
)
def test_the_address_of_the_store(
    arguments: list[str],
    variables: dict[str, str],
    expected: tuple[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert node._store(arguments) == expected
