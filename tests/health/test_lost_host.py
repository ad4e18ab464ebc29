"""A host whose link is cut: named within seconds, and nothing is left of the run on either side; mended, it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.hosts import Hosts, why_not
from tests.support.runs import ROOT
from titan.checkpoint.manager import list_steps

LIMIT_S = 10
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nnodes=2",
    "--nproc-per-node=2",
    "--rdzv-id=7",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=lost1:29500",
    "-m",
    "titan.train",
]
JOB = f"train_configs/debug_model.toml --training.dataset=synthetic --training.seq_len=32 --model.overrides.n_layers=2 --metrics.log_freq=1 --checkpoint.interval=4 --comm.heartbeat_timeout_seconds={LIMIT_S} --comm.train_timeout_seconds=300".split()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(2, name="lost", subnet="10.81.7")
    yield hosts
    hosts.close()


def _start(hosts: Hosts, folder: Path, *, steps: int) -> list[subprocess.Popen[bytes]]:
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, *TORCHRUN, *JOB, f"--job.dump_folder={folder}"]
    agents = []
    for host in hosts.numbers:
        with (folder.parent / f"host-{host}.txt").open("ab") as messages:
            agents.append(
                subprocess.Popen(
                    hosts.on(host, [*command, f"--training.steps={steps}"]),
                    cwd=ROOT,
                    env=dict(os.environ) | variables,
                    stdout=messages,
                    stderr=messages,
                )
            )
    return agents


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2], ids=["the store's host", "another host"])
def test_a_lost_host(lost: int, hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    agents = _start(hosts, folder, steps=100_000)
    deadline = time.monotonic() + 180
    while not list_steps(folder / "checkpoint"):
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents)
        time.sleep(0.2)
    hosts.cut(lost)
    cut = time.monotonic()
    while any(hosts.processes(host) for host in hosts.numbers):
        assert time.monotonic() - cut < 60, {
            host: hosts.processes(host) for host in hosts.numbers
        }
        time.sleep(0.5)
    assert all(agent.wait() != 0 for agent in agents)
    command = [sys.executable, *f"-m titan.cli doctor {folder} --json".split()]
    done = finished(command, code=1)
    finding = json.loads(done.stdout)["findings"][0]
    # Each side has lost the other, and both write into the same folder here: the last word counts.
    from_first = (
        "ranks 2, 3 on lost2 have not been heard of for 10 s: lost2 is lost, or cut off"
    )
    from_second = "on lost2 for 10 s: lost1 is lost, or lost2 is cut off from it"
    assert finding["kind"] == "host_lost"
    assert from_first in finding["cause"] or from_second in finding["cause"], finding

    hosts.mend(lost)
    saved = list_steps(folder / "checkpoint")[-1]
    agents = _start(hosts, folder, steps=saved + 3)
    assert [agent.wait(timeout=180) for agent in agents] == [0, 0]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", saved + 3)
