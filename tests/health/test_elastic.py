"""Replica groups that come and go: every step equals that of one process, and what groups refuse."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import job
from tests.support.runs import logged_rows, same_tensors, saved_tensors
from titan.checks.rules import check
from titan.untrusted import InputError

ROOT = Path(__file__).parents[2]
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="needs torchft"
)
spec = importlib.util.spec_from_file_location("elastic_drill", ROOT / "scripts/elastic_drill.py")
assert spec is not None and spec.loader is not None
drill = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drill)
JOB = (*drill._JOB, *drill._SETTINGS, "--training.seq_len=64")


@needs_torchft
def test_every_step_of_groups_that_are_killed_is_that_of_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "elastic_drill.py"), str(tmp_path)]
    command += ["--groups", "2", "--nproc", "1", "--steps", "200", "--every", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "next step of the survivors" in done.stdout, done.stdout
    rows = drill.rows_of(tmp_path / "run-0")
    assert {row["replica_groups"] for row in rows} == {1, 2}
    # The checkpoint of groups is one copy, and a run without groups goes on from it.
    folder = tmp_path / "run-0"
    last = max(row["step"] for row in rows)
    assert (folder / "checkpoint" / f"step-{last}" / "titan.json").exists()
    settings = [*JOB, f"--job.dump_folder={tmp_path}/alone", f"--training.steps={last + 2}"]
    settings += [f"--checkpoint.folder={folder}/checkpoint"]
    command = [
        sys.executable,
        "-m",
        "titan.cli",
        "train",
        *settings,
        "--training.global_batch_size=4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and f"step-{last}" in done.stdout, done.stdout + done.stderr
    [first, *_] = map(json.loads, (tmp_path / "alone/metrics.jsonl").read_text().splitlines())
    assert first["step"] == last + 1 and first["tokens"] == rows[-1]["tokens"] + 4 * 64


def start_group(number: int, folder: Path, address: str, *settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "titan.cli", "train", *JOB]
    command += [
        "--nproc",
        "1",
        "--fault_tolerance.enable=true",
        "--fault_tolerance.replica_groups=2",
    ]
    command += [f"--fault_tolerance.replica_id={number}", f"--fault_tolerance.lighthouse={address}"]
    command += [f"--job.dump_folder={folder}/group-{number}", f"--checkpoint.folder={folder}/saved"]
    return subprocess.Popen(
        [*command, *settings], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def lighthouse(port: int) -> Any:
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=2000
    )


@needs_torchft
def test_a_group_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    server = lighthouse(0)
    address = "http://127.0.0.1:" + server.address().rpartition(":")[2]
    # Both wait for the other, so that they begin together.
    both = ("--fault_tolerance.min_replicas=2", "--training.steps=1000")
    first = start_group(0, tmp_path, address, *both)
    second = start_group(1, tmp_path, address, *both, "--training.dataset=stdlib")
    try:
        # Which of them is the one before is the lighthouse's choice.
        while first.poll() is None and second.poll() is None:
            time.sleep(0.2)
        refused = first if first.poll() is not None else second
        text = refused.communicate()[0]
        assert refused.returncode == 2, text
        assert "runs another job than group-" in text and "training.dataset: " in text
    finally:
        for process in (first, second):
            process.kill()
        server.shutdown()


@needs_torchft
def test_a_group_waits_for_a_lighthouse_that_died(tmp_path: Path) -> None:
    server = lighthouse(0)
    port = int(server.address().rpartition(":")[2])
    group = start_group(0, tmp_path, f"http://127.0.0.1:{port}", "--training.steps=100000")
    metrics = tmp_path / "group-0" / "metrics.jsonl"

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for(what: Any) -> None:
        end = time.time() + 120
        while not what():
            assert group.poll() is None and time.time() < end
            time.sleep(0.1)

    try:
        wait_for(lambda: steps() > 3)
        server.shutdown()
        del server
        events = tmp_path / "group-0" / "events.jsonl"
        wait_for(lambda: "waiting for 1 replica groups" in events.read_text())
        wait_for(lambda: list((tmp_path / "saved").glob("step-*/titan.json")))
        before, again = steps(), lighthouse(port)
        wait_for(lambda: steps() > before + 3 and again)
    finally:
        group.send_signal(signal.SIGTERM)
        group.communicate()


@needs_torchft
def test_diloco_goes_on_from_a_meeting_bit_for_bit(tmp_path: Path) -> None:
    """The checkpoint holds the outer momentum; without it the weights of the next meeting differ."""
    server = lighthouse(0)
    address = "http://127.0.0.1:" + server.address().rpartition(":")[2]
    section = {"replica_groups": 1, "semi_sync_method": "diloco", "sync_steps": 2}
    settings = [f"--fault_tolerance.{key}={value}" for key, value in section.items()]
    settings += ["--training.steps=8", "--checkpoint.interval=4"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    try:
        for folder in (whole, resumed):
            group = start_group(0, folder, address, *settings)
            text = group.communicate()[0]
            assert group.returncode == 0, text
            if folder == whole:
                shutil.copytree(whole / "saved/step-4", resumed / "saved/step-4")
    finally:
        server.shutdown()
    assert [row["step"] for row in logged_rows(resumed / "group-0")] == [5, 6, 7, 8]
    names = [name for name in saved_tensors(whole / "saved/step-4") if name.startswith("outer.")]
    assert "outer.optimizer.layers.0.attention.wq.weight.momentum_buffer" in names
    assert same_tensors(whole / "saved/step-8", resumed / "saved/step-8")


def test_without_torchft_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.health.launch_groups import launch_groups

    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(InputError, match=r"pip install 'titan-pretrain\[elastic\]'"):
        launch_groups([], job(), num_groups=2, num_processes=1, max_restarts=0)


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"replica_id": 2, "replica_groups": 2}, "replica_id", "must be below replica_groups = 2"),
        (
            {"min_replicas": 3, "replica_groups": 2},
            "min_replicas",
            "is more than replica_groups = 2",
        ),
    ],
)
def test_groups_are_checked(section: dict[str, Any], key: str, message: str) -> None:
    config = job(fault_tolerance={"enable": True, **section}, checkpoint={"enable": True})
    [problem] = check(config)
    assert problem.key == f"fault_tolerance.{key}" and message in problem.message


def test_a_job_that_could_not_take_a_step_back_is_refused() -> None:
    streams = {"sources": [{"type": "huggingface", "path": "c4", "streaming": True}]}
    config = job(fault_tolerance={"enable": True}, data=streams, checkpoint={"enable": False})
    messages = [problem.message for problem in check(config) if problem.key.endswith(".enable")]
    assert len(messages) == 2 and "no stream can" in messages[1]


def test_the_global_batch_is_that_of_all_groups() -> None:
    from titan.config.layout import resolve_layout

    config = job(
        training={"local_batch_size": 2, "global_batch_size": 24},
        fault_tolerance={"enable": True, "replica_groups": 3},
        checkpoint={"enable": True},
    )
    assert resolve_layout(config, 2).accumulation == 2
