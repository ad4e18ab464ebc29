"""torchrun on one node, under signals, without Slurm: titan.tools.cluster.node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import Run
from titan.tools.cluster import node

PROGRAM = [
    "-m",
    "titan.tools.cluster.node",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "titan.train",
]


@pytest.mark.parametrize(
    "whom", ["only torchrun", pytest.param("all processes", marks=pytest.mark.slow)]
)
def test_a_signal_is_left_to_the_ranks(tmp_path: Path, whom: str) -> None:
    """Kubernetes signals only the first process, and Slurm all of them, several times. The ranks save, and the exit code is 75."""
    number = signal.SIGUSR1 if whom == "all processes" else signal.SIGTERM
    run = Run(tmp_path / "run", program=PROGRAM)
    try:
        run.wait_until_training()
        ranks = node.ranks_of(run.process.pid) if whom == "all processes" else []
        assert len(ranks) in (0, 2)
        for pid in [run.process.pid, *ranks] * 2:
            os.kill(pid, number)
        assert run.end() == 75, run.said()
    finally:
        run.process.kill()
    assert f"stopped by {number.name} after step" in run.said()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_a_signal_before_there_are_ranks(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = Run(tmp_path / "run", program=PROGRAM)

    def has_handler() -> bool:  # while torch is not imported yet
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & (1 << (number - 1)))

    try:
        run.wait_until(has_handler)
        run.process.send_signal(number)
        assert run.end() == code
    finally:
        run.process.kill()
    assert not (tmp_path / "run").exists()


def test_a_mistake(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--training.step=3", program=PROGRAM)
    assert run.end() == 2
    assert run.said().count("did you mean 'steps'?") == 1, run.said()


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
