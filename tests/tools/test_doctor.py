"""Faults in real runs, and what `titan doctor` says of them; docs/operate.md has the same table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.runs import Run
from titan.checkpoint.manager import list_steps

FAULTY = str(Path(__file__).with_name("faulty_train.py"))
LAUNCH = f"-m titan.ops.launch --standalone --nproc-per-node=2 {FAULTY}".split()
LIMITS = ("--comm.train_timeout_seconds=6", "--comm.init_timeout_seconds=20")
HEARTBEAT = ("--comm.heartbeat_timeout_seconds=4", "--comm.train_timeout_seconds=90")
FILE = r"(titan|models)/[\w/]+\.py:\d+, in \w+"
HANG = rf"rank 1 on \S+ never entered {{what}} #\d+ of {{axis}} \({FILE}\); it was in hang \(models/llama3/model\.py:\d+, in decode\) for \d+ s; rank 0 waits"
MEMORY = Path("/sys/fs/cgroup/memory")
Start = Callable[..., Run]


@dataclass(frozen=True)
class Case:
    """kind and cause: of the first finding; settings: of the job."""

    fault: str
    kind: str
    cause: str
    settings: tuple[str, ...] = ()
    slow: bool = True


def _hang(axis: str, what: str, *settings: str, slow: bool = True) -> Case:
    cause = HANG.format(what=what, axis=re.escape(f"all ranks ({axis})"))
    return Case(
        "hang", "hang", cause, tuple(f"--parallelism.{text}" for text in settings), slow
    )


CASES = {
    "hang before a collective of dp_shard": _hang(
        "dp_shard", "all_gather_into_tensor of [0-9]+ float", slow=False
    ),
    "hang before a collective of dp_replicate": _hang(
        "dp_replicate", "all_reduce of [0-9]+ float", "data_parallel_replicate_degree=2"
    ),
    "hang before a collective of tp": _hang(
        "tp", "all_gather_into_tensor of 8 x 16 x 64 float", "tensor_parallel_degree=2"
    ),
    "hang before a collective of cp": _hang(
        "cp", "all_gather of [0-9x ]+ float", "context_parallel_degree=2"
    ),
    "hang before a send or receive of pp": _hang(
        "pp", "its receive from rank 0 of 1 x 32 x 64 float32", "pipeline_parallel_degree=2"
    ),
    "another shape": Case(
        "shape",
        "mismatch_shape",
        r"ranks call different collectives, #\d+ of all ranks \(dp_shard\): rank 0 calls all_reduce of 4000 float .*; rank 1 calls all_reduce of 3000 float",
        slow=False,
    ),
    "another dtype": Case("dtype", "mismatch_dtype", r"rank 1 calls all_reduce of 4000 double"),
    "another operation": Case(
        "operation", "mismatch_operation", r"rank 1 calls all_gather of 4000 float"
    ),
    "a rank that ends with 0": Case(
        "missing", "missing_rank", r"rank 1 ended with exit code 0"
    ),
    "a killed rank": Case("kill", "killed", r"rank 1 was ended by SIGKILL, from outside"),
    "a crash in native code": Case(
        "segfault", "crashed", r"rank 1 was ended by SIGSEGV, in \S*ctypes\S*, in string_at"
    ),
    "a dead data source": Case(
        "dead_loader",
        "data_source",
        r"the data source failed \(rank 1\): .*titan/data/loader\.py:\d+, in \w+\): ConnectionError: file server data1 does not answer",
    ),
    "a data source that does not answer": Case(
        "stuck_loader",
        "hang_in_data",
        r"rank 1 on \S+ never entered all_reduce .*; it was in __next__ \(titan/data/loader\.py:\d+, in __next__\) for \d+ s; rank 0 waits",
    ),
    "a stopped process": Case(
        "stopped",
        "rank_silent",
        r"rank 1 on \S+ has not been heard of for 4 s: it is stopped, by SIGSTOP or the like",
        HEARTBEAT,
        slow=False,
    ),
    "a locked interpreter": Case(
        "locked",
        "rank_silent",
        r"rank 1 on \S+ has not been heard of for 4 s: its interpreter is locked by a C extension",
        HEARTBEAT,
    ),
    "a device without memory": Case(
        "device_oom", "out_of_device_memory", r"the device's memory was not enough \(rank 1\)"
    ),
}


def begin(start: Start, fault: str, *settings: str, **options: Any) -> Run:
    few = ("--training.steps=12", "--checkpoint.enable=false", *LIMITS)
    options = {"program": LAUNCH, "OMP_NUM_THREADS": "1", "FAULT": fault} | options
    return start(*few, *settings, **options)


def test_a_rank_that_fails_does_not_wait_for_the_process_group(
    start: Start, tmp_path: Path
) -> None:
    """faulty_train.py never comes back from destroy_process_group."""
    (tmp_path / "store").mkdir()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "FAULTY_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": "1", "TITAN_STORE": str(tmp_path / "store")}  # no port is opened
    run = begin(start, "device_oom", program=[FAULTY], **alone)
    assert run.end(within_s=60) == 1, run.said()
    assert run.status()["kind"] == "out_of_device_memory"
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in run.status()["reason"]


def doctor(run: Run, *, code: int = 1) -> dict[str, Any]:
    command = [sys.executable, *f"-m titan.cli doctor {run.folder} --json".split()]
    done = finished(command, code=None)
    assert done.returncode == code, done.stdout + done.stderr + run.said()
    return json.loads(done.stdout)


def cause(run: Run, kind: str) -> str:
    """What the first finding says, which has to be of this kind."""
    found = doctor(run)["findings"][0]
    dumps = sorted(p.name for p in run.folder.glob("flight_recorder/*"))
    assert found["kind"] == kind, (found, dumps, run.said())
    assert found["evidence"] and found["advice"]
    if found["kind"] in ("killed", "missing_rank"):
        assert "run the same command again" in found["advice"]
    return found["cause"]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if c.slow else [], id=name) for name, c in CASES.items()],
)  # fmt: skip
def test_the_cause_is_named(case: Case, start: Start) -> None:
    run = begin(start, case.fault, *case.settings)
    assert run.end() == 1, run.said()
    said = cause(run, case.kind)
    assert re.search(case.cause, said), said
    assert not run.processes()
    if case.fault in ("stopped", "locked"):  # it wrote its stack when it was ended
        assert run.status()["state"] == "hung"
        assert "when rank 1 was ended, it was in tools/faulty_train.py:" in said, said
        assert "faulty_train.py" in (run.folder / "logs" / "rank-1.stacks.txt").read_text()


@pytest.mark.slow
def test_rank_0_is_stopped_and_the_store_with_it(start: Start) -> None:
    run = begin(start, "stopped", *HEARTBEAT, FAULTY_RANK="0")
    assert run.end() == 1, run.said()
    said = cause(run, "rank_silent")
    assert re.match(r"rank 0 on \S+ has not been heard of for 4 s: it is stopped", said), said


@pytest.mark.slow
def test_a_slow_rank(start: Start) -> None:
    run = begin(start, "slow")
    assert run.end() == 0, run.said()
    assert re.match(r"rank 1 is slow: 0\.\d\d s of work per step", cause(run, "slow_rank"))


@pytest.mark.slow
def test_a_loss_that_is_no_number(start: Start) -> None:
    run = begin(start, "none", TITAN_FAULT="nan:40")
    assert run.end() == 1, run.said()
    said = cause(run, "loss_not_finite")
    assert re.search(r"step 3: loss nan, gradient norm nan \(rank \d: samples 40 to 47\)", said)


@pytest.mark.slow
def test_checkpoints_that_are_all_damaged(start: Start) -> None:
    first = begin(start, "none", "--checkpoint.enable=true", "--checkpoint.interval=6")
    assert first.end() == 0, first.said()
    for step in list_steps(first.folder / "checkpoint"):
        for file in (first.folder / "checkpoint" / f"step-{step}").rglob("*.distcp"):
            file.write_bytes(file.read_bytes()[:-100])
    run = begin(start, "none", "--checkpoint.enable=true", "--training.steps=20")
    assert run.end() == 2, run.said()
    assert "NO CHECKPOINT" in cause(run, "checkpoint_damaged")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The run folder on a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("a small file system (tmpfs) needs root")
    folder = tmp_path / "run"
    folder.mkdir()
    subprocess.run(f"mount -t tmpfs -o size=2m tmpfs {folder}".split(), check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_full_disk(small_disk: Path, start: Start) -> None:
    save = ("--checkpoint.enable=true", "--checkpoint.interval=3")
    run = begin(start, "none", *save, "--checkpoint.on_failure=stop")
    assert run.end() == 1, run.said()
    assert "the disk" in cause(run, "disk_full")


@pytest.mark.slow
def test_a_host_without_memory(start: Start, tmp_path: Path) -> None:
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("a limit of memory needs root and cgroup v1")
    own = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if ":memory:" in line
    )
    group = Path(f"{MEMORY}{own}") / f"titan-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(3 * 2**30))
        join = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
            "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        program = ["-c", join, str(group / "cgroup.procs"), *LAUNCH]
        run = begin(start, "host_oom", "--comm.train_timeout_seconds=60", program=program)
        assert run.end() == 1, run.said()
        said = cause(run, "out_of_host_memory")
        assert said.startswith("rank 1 was killed by the kernel: the memory of the host"), said
    finally:
        time.sleep(0.5)
        group.rmdir()


def test_a_run_that_is_well_and_one_that_was_stopped(start: Start) -> None:
    run = begin(start, "none", "--training.steps=100000", "--checkpoint.enable=true")
    run.wait_until_training()
    for rank in (0, 1):  # a living run may be asked, and goes on
        os.kill(run.rank(rank), signal.SIGUSR2)
    run.wait_until(lambda: len(list(run.folder.glob("flight_recorder/rank-*.json"))) == 2)
    step = run.steps()[-1]
    run.wait_until_training(step=step + 2)
    found = doctor(run, code=0)
    assert (found["state"], found["findings"]) == ("running", [])
    assert re.match(rf"running: step \d+, on process {run.rank(0)} on ", found["summary"])
    for rank in (0, 1):
        os.kill(run.rank(rank), signal.SIGTERM)
    assert run.end() == 75
    assert doctor(run, code=0)["summary"].startswith("stopped by a signal after step ")
