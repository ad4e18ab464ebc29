"""Replica groups that come and go: every step equals that of one process, and what groups refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import torch

from scripts.drills import groups as drill
from tests.support.commands import Shell, finished
from tests.support.jobs import ROOT, job
from tests.support.runs import logged_rows, logged_steps, saved_tensors
from tests.support.tables import tabled
from titan.base.untrusted import InputError
from titan.checks.rules import check
from titan.cli import main
from titan.config.load import load_from_argv
from titan.contrib.elastic import membership
from titan.contrib.elastic.section import groups_of
from titan.run.step_limit import StepLimit

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="needs torchft"
)
JOB = drill.JOB
Group = subprocess.Popen[str]


def test_groups_judge_a_step_before_all_other_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ReplicaGroups", Mock())
    run = Mock(config=job())
    groups = membership.Elastic(run)
    groups.updated(Mock())
    assert groups.is_first and run.repeat.called
    run.hook(
        StepLimit
    ).step_end.assert_called_once()  # the next quorum may take longer than a step


@needs_torchft
def test_every_step_of_groups_that_are_killed_is_that_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(ROOT / "scripts/drill.py"), "groups", str(folder)]
    command += ["--groups", "2", "--nproc", "1", "--steps", "200", "--every", "1.5"]
    done = finished(command, cwd=ROOT)
    assert "next step of the survivors" in done.stdout, done.stdout
    rows = drill.rows_of(folder)
    assert {row["replica_groups"] for row in rows} == {1, 2}
    # The checkpoint of groups is one copy, and a run without groups goes on from it.
    last = max(row["step"] for row in rows)
    assert (folder / "checkpoint" / f"step-{last}" / "titan.json").exists()
    settings = [*JOB, f"--job.dump_folder={tmp_path}/alone", f"--training.steps={last + 2}"]
    settings += [f"--checkpoint.folder={folder}/checkpoint"]
    settings += ["--training.global_batch_size=4"]
    command = [sys.executable, "-m", "titan.cli", "train", *settings]
    done = finished(command, cwd=ROOT, code=None)
    assert done.returncode == 0 and f"step-{last}" in done.stdout, done.stdout + done.stderr
    [first, *_] = map(json.loads, (tmp_path / "alone/metrics.jsonl").read_text().splitlines())
    assert first["step"] == last + 1 and first["tokens"] == rows[-1]["tokens"] + 4 * 64


@needs_torchft
def test_a_checkpoint_of_three_groups_resumes_with_any_number(tmp_path: Path) -> None:
    def train(name: str, *settings: str) -> Path:
        """Train to step 4; a rate of 1e-30 leaves the weights as they were loaded."""
        folder = tmp_path / name
        command = [sys.executable, "-m", "titan.cli", "train", *JOB, *settings]
        command += [f"--job.dump_folder={folder}", "--checkpoint.interval=1"]
        finished(command, cwd=ROOT)
        return folder

    def groups(number: int) -> tuple[str, ...]:
        """Begin when all of them are there."""
        least = f"--fault_tolerance.min_replicas={number}"
        return ("--elastic", "--groups", str(number), "--nproc", "1", least)

    saved = train("three", *groups(3), "--training.steps=3") / "checkpoint"
    expected, tensors = saved_tensors(saved / "step-3"), {}
    weights = [name for name in expected if name.startswith("model.")]
    assert len(weights) > 30
    for name, settings in (
        ("one", groups(1)),
        ("four", groups(4)),
        ("none", ()),
    ):
        shutil.copytree(saved, tmp_path / name / "checkpoint")
        folder = train(name, "--optimizer.lr=1e-30", "--training.steps=4", *settings)
        tensors[name] = saved_tensors(folder / "checkpoint" / "step-4")
        assert all(torch.equal(tensors[name][key], expected[key]) for key in weights), name
    # Where the arithmetic is the same, the moments after the step are too.
    assert all(torch.equal(tensors["one"][key], tensors["none"][key]) for key in expected)
    rows = drill.rows_of(tmp_path / "four")
    assert {(row["step"], row["first_sample"], row["replica_groups"]) for row in rows} == {
        (4, 18, 4)
    }


def lighthouse(port: int = 0, min_replicas: int = 1) -> Any:
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=20_000,
        heartbeat_timeout_ms=2000,
    )


def address_of(server: Any) -> str:
    return "http://127.0.0.1:" + server.address().rpartition(":")[2]


@contextmanager
def groups_of_lighthouse(folder: Path, server: Any) -> Iterator[Callable[..., Group]]:
    """Yield a function that starts groups at a lighthouse. End all groups afterwards."""
    started: list[Group] = []

    def start(number: int, *settings: str, **options: Any) -> Group:
        started.append(start_group(number, folder, address_of(server), *settings, **options))
        return started[-1]

    try:
        yield start
    finally:
        for group in started:
            if group.poll() is None:
                end_group(group)
        server.shutdown()


def wait_for(what: Callable[[], Any], *groups: Group) -> None:
    end = time.time() + 120
    while not what():
        assert all(group.poll() is None for group in groups) and time.time() < end
        time.sleep(0.1)


def end_group(group: Group) -> None:
    """End a group as the loss of its node does: its processes end with their launcher."""
    group.kill()
    group.communicate()


SLOW_STATE = """
import sys, time
from titan.cli import main
from titan.contrib.elastic.membership import Elastic

state = Elastic.state
Elastic.state = lambda self: time.sleep(float(sys.argv[1])) or state(self)
sys.exit(main(sys.argv[2:]))
"""


def start_group(
    number: int, folder: Path, address: str, *settings: str, state_s: int = 0
) -> Group:
    """Start a group. It prints nothing if it takes `state_s` seconds to send its state."""
    program = ["-m", "titan.cli", "train", "--nproc", "1"]
    if state_s:
        program = ["-c", SLOW_STATE, str(state_s), "train"]
    section = {"enable": "true", "replica_groups": 2, "replica_id": number}
    keys = {f"fault_tolerance.{key}": value for key, value in section.items()}
    keys |= {"fault_tolerance.lighthouse": address, "checkpoint.folder": folder / "saved"}
    keys["job.dump_folder"] = folder / f"group-{number}"
    return subprocess.Popen(
        [sys.executable, *program, *JOB, *(f"--{k}={v}" for k, v in keys.items()), *settings],
        cwd=ROOT,
        stdout=subprocess.DEVNULL if state_s else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@needs_torchft
@pytest.mark.parametrize("of_lighthouse", [1, 2])
def test_below_min_replicas_a_group_waits_and_saves(tmp_path: Path, of_lighthouse: int) -> None:
    both = ("--fault_tolerance.min_replicas=2", "--training.steps=100000")
    both += ("--checkpoint.interval=99999",)
    folder = tmp_path / "group-0"
    with groups_of_lighthouse(tmp_path, lighthouse(0, of_lighthouse)) as start:
        first, second = (start(number, *both) for number in (0, 1))
        wait_for(lambda: len(logged_steps(folder)) > 3, first, second)
        end_group(second)
        events, waits = folder / "events.jsonl", "waiting for 2 replica groups"
        wait_for(lambda: waits in events.read_text(), first)
        wait_for(lambda: list((tmp_path / "saved").glob("step-*/titan.json")), first)
        before = len(logged_steps(folder))
        second = start(1, *both)
        wait_for(lambda: len(logged_steps(folder)) > before + 3, first, second)
        assert {row["replica_groups"] for row in logged_rows(folder)} == {2}


@needs_torchft
@pytest.mark.slow
def test_a_state_that_takes_longer_than_the_limit_of_a_sum_heals(tmp_path: Path) -> None:
    rate = ("--lr_scheduler.total_steps=100000", "--optimizer.lr=1e-5")
    both = (*rate, "--training.steps=100000")
    both += ("--fault_tolerance.process_group_timeout_ms=10000",)
    with groups_of_lighthouse(tmp_path, lighthouse()) as start:
        slow = start(0, *both, state_s=12)
        wait_for(lambda: len(logged_steps(tmp_path / "group-0")) > 3, slow)
        healed = start(1, *both)
        wait_for(lambda: len(logged_steps(tmp_path / "group-1")) > 3, slow, healed)
        assert {row["replica_groups"] for row in logged_rows(tmp_path / "group-1")} == {2}
        steps = logged_steps(tmp_path / "group-1")[-1]
    assert drill.replay(tmp_path, [*JOB, *rate], steps) < drill.BOUND


@needs_torchft
def test_a_group_that_cannot_heal_ends_and_the_others_go_on(tmp_path: Path) -> None:
    both = ("--training.steps=100000", "--fault_tolerance.healing_timeout_seconds=2")
    folder = tmp_path / "group-0"
    with groups_of_lighthouse(tmp_path, lighthouse()) as start:
        healthy = start(0, *both, state_s=1000)
        wait_for(lambda: len(logged_steps(folder)) > 3, healthy)
        for _ in range(2):
            returning = start(1, *both)
            text = returning.communicate(timeout=100)[0]
            assert returning.returncode == 1, text
            assert "healing_timeout_seconds = 2" in text and "group-1 ends, so that" in text
            before = len(logged_steps(folder))
            wait_for(lambda at=before: len(logged_steps(folder)) > at + 3, healthy)
        assert {row["replica_groups"] for row in logged_rows(folder)} == {1}


@needs_torchft
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("training.local_batch_size=4", "runs another job than group-"),
        ("fault_tolerance.replica_id=0", "replica_id: group-0 trains already"),
    ],
)
def test_a_group_of_another_job_is_refused_by_name(
    tmp_path: Path, setting: str, said: str
) -> None:
    # Both wait for the other, so that they begin together.
    both = ("--fault_tolerance.min_replicas=2", "--training.steps=1000")
    with groups_of_lighthouse(tmp_path, lighthouse()) as start:
        first, second = start(0, *both), start(1, *both, f"--{setting}")
        # Which of them is the one before is the lighthouse's choice.
        while first.poll() is None and second.poll() is None:
            time.sleep(0.2)
        refused = first if first.poll() is not None else second
        text = refused.communicate()[0]
        assert refused.returncode == 2, text
        assert said in text and setting.partition("=")[0] in text, text
        assert "[INFO]" not in text  # of torchft, several at each step


@needs_torchft
@pytest.mark.parametrize("moves", [False, True])
def test_a_group_waits_for_a_lighthouse_that_died(tmp_path: Path, moves: bool) -> None:
    """It comes back at its address, or its file says where."""
    server, file = lighthouse(), tmp_path / "lighthouse"
    address = address_of(server)
    file.write_text(f"{address}\n")
    where = str(file) if moves else address
    nproc = ["--nproc", "2"] if moves else []
    group = start_group(0, tmp_path, where, "--training.steps=100000", *nproc)
    folder = tmp_path / "group-0"
    try:
        wait_for(lambda: len(logged_steps(folder)) > 3, group)
        server.shutdown()
        del server
        events = folder / "events.jsonl"
        wait_for(lambda: "waiting for 1 replica group:" in events.read_text(), group)
        wait_for(lambda: list((tmp_path / "saved").glob("step-*/titan.json")), group)
        before, again = (
            len(logged_steps(folder)),
            lighthouse(0 if moves else urlsplit(address).port or 0),
        )
        file.write_text(address_of(again))
        wait_for(lambda: len(logged_steps(folder)) > before + 3 and again, group)
    finally:
        group.send_signal(signal.SIGTERM)
        group.communicate()


def test_the_script_of_groups_is_an_array_that_finds_its_lighthouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "lighthouse").write_text("http://of-an-earlier-run:1\n")
    arguments = f"{ROOT / JOB[0]} --job.dump_folder={run} --checkpoint.enable=true"
    options = "--nodes 2 --gpus-per-node 0 --groups 3"
    shell(f"slurm {arguments} {options}")
    script = (run / "job.sbatch").read_text()
    assert "#SBATCH --array=0-2" in script and not (run / "lighthouse").exists()
    assert (
        f"titan.contrib.elastic.launch_groups {run}/lighthouse"
        in (run / "lighthouse.sbatch").read_text()
    )
    # What an element of the array gives to titan.
    shown = script[: script.index("set -uo pipefail")] + "printf '%s\\n' \"$@\""
    variables = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
    done = finished(["bash", "-c", shown], env=variables, code=None)
    job = load_from_argv(done.stdout.splitlines())
    section = groups_of(job)
    assert (section.enable, section.replica_id, section.replica_groups) == (True, 1, 3)
    assert section.lighthouse == f"{run}/lighthouse"  # each group reads it, again after a loss
    assert (
        job.job.dump_folder == f"{run}/group-1" and job.checkpoint.folder == f"{run}/checkpoint"
    )


@pytest.mark.parametrize(
    ("ends", "queued", "requeued", "code"),
    [
        ("", "5", True, 143),  # USR1, a minute before the time limit
        ("exit 1", "5", True, 1),
        ("exit 1", "", False, 1),  # no group is left
        ("exit 2", "5", False, 2),
    ],
)
def test_the_lighthouse_is_queued_again_while_there_are_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
    ends: str,
    queued: str,
    requeued: bool,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {
        "python": ends or "kill -USR1 $PPID; exec sleep 60",
        "squeue": f"echo {queued} $*",
        "scontrol": "echo scontrol $*",
    }
    if not queued:
        texts["squeue"] = "true"
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    arguments = f"{ROOT / JOB[0]} --job.dump_folder=run --checkpoint.enable=true"
    shell(f"slurm {arguments} --nodes 1 --gpus-per-node 0 --groups 2")
    script = tmp_path / "run/lighthouse.sbatch"
    assert "#SBATCH --requeue" in script.read_text()
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    done = finished(["bash", script], env=variables, code=None)
    assert ("scontrol requeue 7" in done.stdout) == requeued, done.stdout + done.stderr
    assert done.returncode == code or (not ends and done.returncode > 128)


def test_without_torchft_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.contrib.elastic.launch_groups import launch_groups

    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(InputError, match=r"pip install 'titan-pretrain\[elastic\]'"):
        launch_groups([], job(), num_groups=2, num_processes=1, max_restarts=0)


@tabled("programs, restarts, code, lines")
def test_a_run_is_done_when_a_group_is_and_each_loss_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    programs: list[str],
    restarts: int,
    code: int,
    lines: list[str],
) -> None:
    from titan.contrib.elastic import launch_groups

    def start(group: Any) -> None:
        program = f"import os; {programs[group.number]}"
        options = {"stdout": subprocess.PIPE, "text": True}
        group.process = subprocess.Popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(launch_groups._Group, "_start", start)
    found = launch_groups.launch_groups(
        [],
        job(fault_tolerance={"lighthouse": "http://x"}),
        num_groups=2,
        num_processes=1,
        max_restarts=restarts,
    )
    assert (found, capsys.readouterr().out.splitlines()) == (code, lines)


def environments_of_groups(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Any]:
    """Return the environments in which `titan train --elastic` starts its groups here, if there were eight GPUs."""
    from titan.contrib.elastic import launch_groups

    found: list[Any] = []

    def start(group: Any) -> None:
        found.append((group.variables, group.command))
        group.process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)

    monkeypatch.setattr("titan.base.hardware.count_accelerators", lambda: 8)
    monkeypatch.setattr(launch_groups._Group, "_start", start)
    arguments = f"{ROOT / JOB[0]} --checkpoint.enable=true --training.dataset=synthetic".split()
    arguments += ["--fault_tolerance.lighthouse=http://x:1", "--training.global_batch_size=-1"]
    assert main(["train", *arguments, "--elastic", *options]) == 0
    return found


@tabled("visible, options, expected")
def test_groups_share_out_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    options: list[str],
    expected: list[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    groups = environments_of_groups(monkeypatch, *options)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables, _ in groups] == expected
    for (_, command), devices in zip(groups, expected, strict=True):
        assert command[command.index("--nproc") + 1] == str(len(devices.split(",")))


@tabled("options, message")
def test_groups_that_would_share_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    shell: Shell,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("titan.base.hardware.count_accelerators", lambda: 8)
    [line] = shell.refuse(
        f"train {ROOT / JOB[0]} --checkpoint.enable=true --elastic", *options
    ).splitlines()
    assert line.startswith("command line: ") and message in line


@pytest.mark.parametrize(
    ("enable", "of_user", "expected"),
    [(True, None, "2"), (True, "1", "1"), (False, None, None)],
)
def test_nccl_leaves_it_to_the_groups_to_go_on(
    monkeypatch: pytest.MonkeyPatch, enable: bool, of_user: str | None, expected: str | None
) -> None:
    from titan.run import trainer

    name, found = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.setenv(name, of_user or "")
    if of_user is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        trainer, "start_process_group", lambda **_: found.append(os.environ.get(name))
    )
    config = job(fault_tolerance={"enable": enable}, checkpoint={"enable": True})
    trainer.connect(config)
    assert found == [expected]


@tabled("section, key, message")
def test_groups_are_checked(section: dict[str, Any], key: str, message: str) -> None:
    config = job(fault_tolerance={"enable": True, **section}, checkpoint={"enable": True})
    [problem] = check(config)
    assert problem.key == f"fault_tolerance.{key}" and message in problem.message


def test_a_job_that_could_not_take_a_step_back_is_refused() -> None:
    streams = {"sources": [{"type": "huggingface", "path": "c4", "streaming": True}]}
    config = job(
        fault_tolerance={"enable": True},
        data=streams,
        training={"enable_cpu_offload": True},
        checkpoint={"enable": False},
    )
    messages = [problem.message for problem in check(config) if problem.key.endswith(".enable")]
    assert len(messages) == 3 and "no stream can" in messages[2]
    # The groups' NCCL cannot sum gradients on the host: no step would ever count.
    assert "enable_cpu_offload" in messages[1]


def test_the_global_batch_is_that_of_all_groups() -> None:
    from titan.checks.layout_rules import resolve_layout

    config = job(
        training={"local_batch_size": 2, "global_batch_size": 24},
        fault_tolerance={"enable": True, "replica_groups": 3},
        checkpoint={"enable": True},
    )
    assert resolve_layout(config, 2).accumulation == 2


def test_the_simulator_says_what_it_leaves_out(shell: Shell) -> None:
    sim = f"sim {ROOT}/train_configs/debug_model.toml --training.seq_len=64 --world-size=1"
    sim += " --hardware=h100-sxm --model.flavor=tiny --fault_tolerance.replica_groups=3"
    groups = f"{sim} --fault_tolerance.enable=true"
    line = "  groups    one of 3 replica groups; the cost of their sums is not simulated\n"
    for more in ("", " --sweep=fault_tolerance.replica_id=0,1"):
        assert shell(groups + more).out.count(line) == 1
    assert json.loads(shell(f"{groups} --json=-").out)["replica_groups"] == 3
    assert "groups" not in shell(sim).out
    assert "--run: does not know replica groups" in shell.refuse(f"{groups} --run")
