"""Two network namespaces as hosts, a rank on each, and a link that is cut and mended; and how much goes over it.

A cut link tells nobody: no packet comes back, and TCP itself would wait for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, why_not
from tests.support.runs import logged_steps, same_tensors
from titan.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
STEPS = 400
GONE_WITHIN_S = 60


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    made = Hosts(2, name="h", subnet="10.78.0")
    try:
        yield made
    finally:
        made.close()


class Run:
    """One start of a job, on both hosts."""

    def __init__(self, hosts: Hosts, folder: Path, *settings: str, attempt: int = 0) -> None:
        self.hosts, self.folder = hosts, folder
        self.messages = folder.with_name(f"{folder.name}-{attempt}.txt")
        command = [
            sys.executable,
            "-m",
            "titan.ops.cluster.node",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        command += ["--rdzv-backend=titan", f"--rdzv-id={attempt}", "--rdzv-endpoint=h1:29500"]
        command += ["-m", "titan.train", "train_configs/debug_model.toml"]
        command += [f"--job.dump_folder={folder}"]
        command += ["--training.dataset=synthetic", "--training.local_batch_size=1"]
        command += ["--training.seq_len=32", "--model.overrides.n_layers=2", *settings]
        variables = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1"]
        with self.messages.open("w") as file:
            self.agents = [
                subprocess.Popen(
                    hosts.on(i, [*variables, f"PET_RDZV_CONF=rank={i - 1}", *command]),
                    cwd=ROOT,
                    stdout=file,
                    stderr=file,
                )
                for i in hosts.numbers
            ]

    def steps(self) -> list[int]:
        return logged_steps(self.folder)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while max(self.steps(), default=0) < step:
            assert time.monotonic() < deadline, self.messages.read_text()
            time.sleep(0.02)

    def end(self, *, within_s: float) -> list[int]:
        """The exit codes of both agents."""
        deadline = time.monotonic() + within_s
        while any(agent.poll() is None for agent in self.agents):
            assert time.monotonic() < deadline, self.messages.read_text()
            time.sleep(0.1)
        return [agent.wait() for agent in self.agents]


@pytest.mark.parametrize("lost", [2, 1], ids=["the other host", "the host of the store"])
def test_a_cut_link(hosts: Hosts, tmp_path: Path, lost: int) -> None:
    settings = [f"--training.steps={STEPS}", "--checkpoint.interval=50", "--metrics.log_freq=5"]
    settings += ["--comm.train_timeout_seconds=30", "--comm.heartbeat_timeout_seconds=6"]
    calm = Run(hosts, tmp_path / "calm", *settings)
    assert calm.end(within_s=200) == [0, 0], calm.messages.read_text()

    run = Run(hosts, tmp_path / "run", *settings)
    run.wait_for_step(120)
    hosts.cut(lost)
    codes = run.end(within_s=GONE_WITHIN_S)
    assert 0 not in codes and 75 not in codes, run.messages.read_text()
    assert [hosts.processes(i) for i in hosts.numbers] == [{}, {}]
    status = json.loads((run.folder / "status.json").read_text())
    assert status["state"] == "failed"
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        assert main(["doctor", str(run.folder)]) == 1
    # Of two, each has lost the other; the run is where rank 0 is, on h1.
    assert "h2 is lost, or cut off" in report.getvalue(), report.getvalue()

    hosts.mend(lost)
    again = Run(hosts, run.folder, *settings, attempt=1)
    assert again.end(within_s=200) == [0, 0], again.messages.read_text()
    assert "starting from" in again.messages.read_text()
    assert again.steps() == calm.steps()
    last = f"checkpoint/step-{STEPS}"
    assert same_tensors(calm.folder / last, run.folder / last)


@pytest.mark.parametrize(
    ("layout", "weights_sent"),
    [
        ("ddp", 1_737_984),
        # All-gathers, forward of all and backward of the first block, which alone was freed: half of each. And gloo's
        # reduce-scatter is an all-reduce: the whole of it.
        ("fsdp", (1_737_984 + 344_576) / 2 + 1_737_984),
    ],
)
def test_bytes_on_the_wire(
    hosts: Hosts, tmp_path: Path, layout: str, weights_sent: float
) -> None:
    """In a step a rank of two sends by an all-reduce 2 (N - 1) / N = 1 of it, by an all-gather half of it. Set-up and end are
    taken off by a shorter run."""
    settings = [
        "--model.overrides.dim=256",
        "--checkpoint.enable=false",
        "--metrics.log_freq=10",
    ]
    if layout == "ddp":
        settings.append("--parallelism.data_parallel_replicate_degree=2")
    sent = []
    for steps in (10, 30):
        before = hosts.sent_bytes(1)
        run = Run(hosts, tmp_path / str(steps), f"--training.steps={steps}", *settings)
        assert run.end(within_s=200) == [0, 0], run.messages.read_text()
        sent.append(hosts.sent_bytes(1) - before)
    assert (sent[1] - sent[0]) / 20 == pytest.approx(4 * weights_sent, rel=0.01)
