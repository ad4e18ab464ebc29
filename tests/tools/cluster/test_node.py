"""torchrun on one node, under signals, without Slurm: titan.ops.cluster.node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.hosts import Hosts, why_not
from tests.support.jobs import ROOT
from tests.support.runs import Run, logged_steps
from tests.support.tables import tabled
from titan.ops.cluster import node

PROGRAM = [
    "-m",
    "titan.ops.cluster.node",
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
def test_a_signal_before_there_are_ranks(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
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


@pytest.mark.parametrize(("code", "is_bad"), [(0, False), (2, False), (75, False), (1, True)])
def test_train_sbatch_learns_of_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_bad: bool
) -> None:
    monkeypatch.setenv("TITAN_BAD_EXIT", str(tmp_path / "bad"))
    monkeypatch.setattr(os, "_exit", lambda _: None)
    node._end(code)
    assert (tmp_path / "bad").exists() == is_bad


def test_a_mistake(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--training.step=3", program=PROGRAM)
    assert run.end() == 2
    assert run.said().count("did you mean 'steps'?") == 1, run.said()


@tabled("arguments, variables, expected")
def test_the_address_of_the_store(
    arguments: list[str],
    variables: dict[str, str],
    expected: list[str | int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert node.store_address(arguments) == (expected and tuple(expected))


PREPARE = """
import json, os, resource, socket, sys
from titan.ops.cluster import node
soft, hard, own = map(int, sys.argv[1:])
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
    resource.setrlimit(kind, (soft, hard))
if own:
    socket.gethostbyname_ex = lambda name: (name, [], ["10.0.0.1", "127.0.1.1"])
node._OUTSIDE, node._NUM_FILES = "127.0.0.1", 2048
node.prepare_host("head" if own else None)
limits = [resource.getrlimit(k)[0] for k in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
print(json.dumps([*limits, os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")]))
"""


def prepared(*words: int, **variables: str) -> tuple[list[object], str]:
    """Return what a node has after `prepare_host`: limits of files and of locked memory, gloo's interface, the cache; and what it says."""
    # A test in this process may have compiled.
    environment = {
        k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"
    } | variables
    command = [sys.executable, "-c", PREPARE, *map(str, words)]
    done = finished(command, env=environment)
    return json.loads(done.stdout), done.stderr


def test_limits_are_raised_as_far_as_they_may_be() -> None:
    found, said = prepared(1024, 4096, 0)
    assert found == [2048, 4096, None, None] and not said
    assert prepared(3000, 4096, 0)[0][0] == 3000
    assert prepared(1024, 1500, 0)[0][0] == 1500


def test_a_container_s_programs_have_a_place_that_stays() -> None:
    variables = {"TITAN_COMPILE_FOLDER": "/shared/.titan-compile", "SLURM_NODEID": "3"}
    assert prepared(64, 64, 0, **variables)[0][3] == "/shared/.titan-compile/node-3"
    variables["TORCHINDUCTOR_CACHE_DIR"] = "/mine"
    assert prepared(64, 64, 0, **variables)[0][3] == "/mine"


def test_a_host_whose_own_name_is_loopback() -> None:
    """Gloo gets an interface that leads out, if there is one; what the user has set stays."""
    found, said = prepared(64, 64, 1, TITAN_NODES="nowhere.invalid")
    assert found[2] is None and "no interface leads out" in said
    found, said = prepared(64, 64, 1, TITAN_NODES="nowhere.invalid", GLOO_SOCKET_IFNAME="ib0")
    assert found[2] == "ib0" and not said


def test_the_interface_that_leads_to_a_host() -> None:
    assert node.interface_to("127.0.0.1") == node.interface_to("nowhere.invalid") == ""
    route = Path("/proc/net/route").read_text().splitlines()[1:]
    default = [line.split()[0] for line in route if line.split()[1] == "00000000"]
    if default:
        assert node.interface_to("192.0.2.1") == default[0]


@pytest.mark.slow
def test_hosts_that_call_themselves_127_0_1_1(tmp_path: Path) -> None:
    """As Debian and Ubuntu write it into /etc/hosts. Nobody sets GLOO_SOCKET_IFNAME, and two hosts train together."""
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(2, name="h", subnet="10.79.0")
    plain, common = hosts.hosts_file, hosts.hosts_file.read_text()
    try:
        agents = []
        for i in hosts.numbers:
            hosts.hosts_file = plain.with_name(f"hosts-{i}")
            hosts.hosts_file.write_text(f"127.0.1.1 h{i}\n{common}")
            command = [sys.executable, *PROGRAM[:2], "--nnodes=2", "--nproc-per-node=1"]
            command += ["--rdzv-backend=titan", "--rdzv-id=1", "--rdzv-endpoint=h1:29500"]
            command += ["-m", "titan.train", "train_configs/debug_model.toml"]
            command += [f"--job.dump_folder={tmp_path}/run", "--training.dataset=synthetic"]
            command += [
                "--training.steps=2",
                "--training.seq_len=32",
                "--model.overrides.n_layers=2",
            ]
            variables = [
                "env",
                "-u",
                "GLOO_SOCKET_IFNAME",
                "OMP_NUM_THREADS=1",
                "TITAN_NODES=h1 h2",
            ]
            with (tmp_path / f"said-{i}").open("w") as said:
                words = hosts.on(i, [*variables, f"PET_RDZV_CONF=rank={i - 1}", *command])
                agents.append(subprocess.Popen(words, cwd=ROOT, stdout=said, stderr=said))
        codes = [agent.wait(timeout=240) for agent in agents]
    finally:
        hosts.hosts_file = plain
        hosts.close()
    said = [(tmp_path / f"said-{i}").read_text() for i in (1, 2)]
    assert codes == [0, 0], said
    assert all("gloo uses eth0" in text for text in said), said
    assert logged_steps(tmp_path / "run") == [1, 2]
