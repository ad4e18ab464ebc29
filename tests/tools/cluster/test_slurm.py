"""Slurm for real: the shipped script on two nodes of a cluster on this machine, struck in every way in which Slurm strikes.

However it is struck, a job goes on by itself, and ends with the weights and the losses of one that was left alone, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import blocks, commands, runnable
from tests.support.runs import logged_rows, logged_steps, same_tensors, saved_tensors
from tests.support.slurm import KILL_WAIT_S, Slurm, why_no_slurm
from tests.tools.cluster.test_manifests import hostile_texts
from titan.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
STEPS = 60
SETTINGS = f"--training.steps={STEPS} --training.local_batch_size=1 --training.seq_len=32 --training.dataset=synthetic --model.overrides.n_layers=2 --checkpoint.interval=5 --checkpoint.keep_latest_k=2 --comm.train_timeout_seconds=20".split()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    cluster = Slurm(3)
    try:
        yield cluster
    finally:
        cluster.close()


class Job:
    """A job of two nodes, with one rank on each, from the shipped script."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, **variables: str) -> None:
        self.slurm, self.folder, self.log = slurm, folder, folder.with_suffix(".out")
        self.id = slurm.run(
            "sbatch",
            "--parsable",
            "--nodes=2",
            f"--output={self.log}",
            *options,
            "scripts/slurm/train.sbatch",
            "train_configs/debug_model.toml",
            f"--job.dump_folder={folder}",
            *SETTINGS,
            cwd=ROOT,
            **environment(NPROC="1", **variables),
        )

    def steps(self) -> list[int]:
        return logged_steps(self.folder)

    def wait_until_training(self, step: int) -> None:
        self.slurm.wait_for(lambda: max(self.steps(), default=0) >= step, within_s=120)

    def said(self) -> str:
        return self.log.read_text() + self.slurm.log()


def environment(**variables: str) -> dict[str, str]:
    """Of a submission: this Python, and the one network interface that the hosts have."""
    return {"PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth0", **variables}


def last_step(folder: Path) -> Path:
    return folder / "checkpoint" / f"step-{STEPS}"


@pytest.fixture(scope="module")
def straight(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that was left alone."""
    job = Job(slurm, tmp_path_factory.mktemp("straight") / "run")
    assert slurm.wait_ended(job.id) == "COMPLETED", job.said()
    assert job.steps() == list(range(1, STEPS + 1))
    assert (
        slurm.field(job.id, "Restarts"),
        len(saved_tensors(last_step(job.folder))) > 30,
    ) == (
        "0",
        True,
    )
    return job.folder


def check_equal(job: Job, straight: Path, *, restarts: int) -> None:
    """It has completed after that many restarts, and neither weights, optimizer states nor any step's loss tell of them."""
    assert job.slurm.wait_ended(job.id) == "COMPLETED", job.said()
    assert int(job.slurm.field(job.id, "Restarts")) == restarts, job.said()
    assert same_tensors(last_step(straight), last_step(job.folder))
    for calm, struck in zip(logged_rows(straight), logged_rows(job.folder), strict=True):
        for key in ("step", "loss", "grad_norm", "tokens"):
            assert calm[key] == struck[key]


def test_requeue(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path / "run")
    job.wait_until_training(7)
    slurm.run("scontrol", "requeue", job.id)
    slurm.requeue_now(job.id)
    check_equal(job, straight, restarts=1)
    assert "stopped by SIGTERM after step" in job.said()


def test_preemption(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    """A job of a partition with a higher priority takes both nodes."""
    job = Job(slurm, tmp_path / "run")
    job.wait_until_training(7)
    take = "sbatch --parsable -p high --nodes=3 --exclusive --output=/dev/null --wrap=true"
    high = slurm.run(*take.split())
    slurm.wait_ended(high)
    slurm.requeue_now(job.id)
    check_equal(job, straight, restarts=1)
    assert "PREEMPTION" in job.said()


def test_time_limit(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    """Slurm sends USR1 to the batch shell some time before the end, and the script requeues the job itself."""
    slurm.hosts.slow_down(2, megabits_per_s=4)
    try:
        job = Job(slurm, tmp_path / "run", "--time=2", "--signal=B:USR1@90")
        job.wait_until_training(1)
        slurm.requeue_now(job.id, "TimeLimit=30", within_s=150)
    finally:
        slurm.hosts.slow_down(2, megabits_per_s=None)
    check_equal(job, straight, restarts=1)
    assert "stopped by SIGUSR1 after step" in job.said()


def test_signals_one_after_the_other(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    """Three stops by the time limit's signal, each at another step; MAX_RESTARTS, 0, does not count them."""
    job = Job(slurm, tmp_path / "run")
    for step in (4, 17, 30):
        job.wait_until_training(step)
        slurm.run("scancel", "--batch", "--signal=USR1", job.id)
        slurm.requeue_now(job.id)
    check_equal(job, straight, restarts=3)


def test_a_lost_node(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    """The link of a node is cut. Slurm gives the job another one, and nothing is lost but the steps since the last save."""
    job = Job(slurm, tmp_path / "run")
    job.wait_until_training(7)
    assert slurm.field(job.id, "NodeList") == "n[1-2]"
    slurm.hosts.cut(2)
    try:
        # Between the two, Slurm calls it COMPLETING.
        slurm.wait_for(lambda: slurm.state(job.id) == "PENDING", within_s=90)
        slurm.requeue_now(job.id)
        check_equal(job, straight, restarts=1)
        assert slurm.field(job.id, "NodeList") == "n[1,3]"
    finally:
        slurm.hosts.mend(2)
        slurm.wait_for(lambda: slurm.idle_nodes() == 3, within_s=60)


def test_a_crash(slurm: Slurm, straight: Path, tmp_path: Path) -> None:
    """MAX_RESTARTS=1: the first kill -9 of a rank is survived, the second one is not."""
    job = Job(slurm, tmp_path / "run", MAX_RESTARTS="1")
    for crash, step in enumerate((7, 25), start=1):
        job.wait_until_training(step)
        [rank] = [pid for pid, words in slurm.hosts.processes(2).items() if is_rank(words)]
        subprocess.run(f"kill -9 {rank}".split(), check=True)
        if crash == 1:
            slurm.requeue_now(job.id)
    assert slurm.wait_ended(job.id) == "FAILED", job.said()
    crashes = re.findall(r"titan: crash (\d) of job", job.said())
    assert (crashes, slurm.field(job.id, "Restarts")) == (["1", "2"], "1"), job.said()


def is_rank(command_line: str) -> bool:
    return "titan.train" in command_line and "titan.ops.cluster.node" not in command_line


def test_scancel_is_final(slurm: Slurm, tmp_path: Path) -> None:
    """A cancelled job saves, and is not requeued by the script."""
    job = Job(slurm, tmp_path / "run")
    job.wait_until_training(3)
    slurm.run("scancel", job.id)
    assert slurm.wait_ended(job.id) == "CANCELLED"
    slurm.wait_for(lambda: slurm.idle_nodes() == 3, within_s=KILL_WAIT_S + 10)
    status = json.loads((job.folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    time.sleep(2)
    assert slurm.state(job.id) == "CANCELLED"


def test_the_page(slurm: Slurm, tmp_path: Path) -> None:
    """The commands of docs/cluster.md, for the two nodes and the partition that there are."""
    [block] = [b for b in blocks("docs/cluster.md", "bash") if "sbatch" in b.text]
    batch, checked = (
        runnable(command).replace("--nodes 16", "--nodes 2") for command in commands(block)
    )
    assert "--gpus-per-node 8" in batch and "--partition gpu" in checked
    batch = batch.replace("--gpus-per-node 8", "--gpus-per-node 2")
    checked = checked.replace("--partition gpu", "--partition low --gpus-per-node 2 --submit")
    script = f"{batch} --job.dump_folder=outputs/on_slurm\n{checked} --job.dump_folder=outputs/checked"
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    assert main(f"config --list debug_model --output {tmp_path}/job.toml".split()) == 0
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = slurm.run("bash", "-ec", script, cwd=tmp_path, PATH=path, GLOO_SOCKET_IFNAME="eth0")
    jobs = re.findall(r"Submitted batch job (\d+)", said)
    assert len(jobs) == 2, said
    for job, folder in zip(jobs, ("on_slurm", "checked"), strict=True):
        log = Path(slurm.field(job, "StdOut"))
        assert slurm.wait_ended(job, within_s=300) == "COMPLETED", log.read_text()
        assert logged_steps(tmp_path / "outputs" / folder) == list(range(1, 21))
        assert "2 nodes x 2 ranks" in log.read_text()


def test_preflight_before_the_job(slurm: Slurm, tmp_path: Path) -> None:
    """Three nodes are given, preflight and the job run on two of them, and an edit of the file meanwhile changes nothing."""
    job, folder = tmp_path / "job.toml", tmp_path / "run"
    job.write_bytes((ROOT / "train_configs/debug_model.toml").read_bytes())
    options = ["--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--preflight"]
    options += [
        "--spare-nodes=1",
        f"--job.dump_folder={folder}",
        *SETTINGS,
        "--training.steps=4",
    ]
    assert main(["slurm", str(job), *options, "--", "--comment=mine"]) == 0
    job.write_text("nonsense")
    name = slurm.run(
        "sbatch", "--parsable", str(folder / "job.sbatch"), cwd=ROOT, **environment()
    )
    log = folder / f"slurm-{name}.out"
    assert slurm.wait_ended(name) == "COMPLETED", log.read_text()
    said = log.read_text()
    assert (
        "2 nodes x 1 ranks" in said
        and "2 ranks on 2 hosts" in said
        and "dry run: first" in said
    )
    assert slurm.field(name, "NumNodes") == "3" and slurm.field(name, "Comment") == "mine"
    assert logged_steps(folder) == [1, 2, 3, 4]


def test_hostile_scripts_are_valid(slurm: Slurm, tmp_path: Path) -> None:
    """Whatever is in a job's words and folder, the real sbatch takes what `titan slurm` writes, and finds in it what was meant."""
    for i, text in enumerate(hostile_texts(60, seed=1)):
        folder, output = tmp_path / str(i) / text.replace("/", "_"), tmp_path / "job.sbatch"
        job = ["train_configs/debug_model.toml", f"--job.dump_folder={folder}"]
        options = f"--nodes=2 --gpus-per-node=0 --output={output}".split()
        if code := main(["slurm", *job, *options, f"--container={text}"]):
            assert (code, str(folder).isprintable() and "%" not in str(folder)) == (2, False)
            continue
        slurm.run("sbatch", "--test-only", str(output))
        held = slurm.run("sbatch", "--parsable", "--hold", str(output), cwd=tmp_path)
        shown = slurm.run("scontrol", "show", "job", held)
        slurm.run("scancel", held)
        assert f"StdOut={folder}/slurm-{held}.out\n" in shown, (text, shown)
        assert "NumNodes=2" in shown and f"Command={output}\n" in shown, text
        assert not list(tmp_path.rglob("HIT"))
