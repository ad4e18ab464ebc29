"""titan/ops/run_lock.py: one run folder, one run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.tables import tabled
from titan.ops import run_lock
from titan.ops.run_lock import ProcessId, RunLock, RunLocked

ROOT = Path(__file__).parents[2]
# Runs the command, and says on the last line of stderr whether torch was imported.
PROBE = "import sys; from titan.cli import main; code = main(); print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
HOLD = """
import sys, time
from pathlib import Path
from titan.ops.monitor import Monitor
from titan.ops.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
Monitor(Path(sys.argv[1]), lock=lock).start()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of tmp_path, as a Slurm job."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SLURM_JOB_ID": "4711"},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def start_second_copy(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, "train", "train_configs/debug_model.toml"]
    return finished(
        [*command, f"--job.dump_folder={folder}", *options], cwd=ROOT, timeout=300, code=None
    )


@pytest.mark.parametrize("options", [(), ("--nproc", "2")], ids=["in place", "2 processes"])
def test_a_second_copy_is_refused(
    options: tuple[str, ...], holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = set(tmp_path.rglob("*"))
    result = start_second_copy(tmp_path, *options)
    assert result.returncode == 2 and not result.stdout
    *said, has_torch = result.stderr.splitlines(keepends=True)
    assert has_torch == "False\n", "refused before torch is imported"
    assert "".join(said) == (
        f"{tmp_path}/lock.json: this run is already going on, in process {holder.pid} on {socket.gethostname()} "
        "(job 4711); end it first, or choose another job.dump_folder\n"
    )
    assert set(tmp_path.rglob("*")) == before


def test_a_stopped_owner_is_alive(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(RunLocked):
        RunLock(tmp_path).require_free()


def test_the_lease_of_a_dead_owner_is_taken_over(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()  # not waited for: a zombie is dead
    time.sleep(0.2)
    mine = RunLock(tmp_path)
    mine.acquire()
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_process_id_used_again_is_no_owner(tmp_path: Path) -> None:
    """Nor is one that no system has."""
    for pid, machine in ((os.getppid(), ProcessId.this().machine), (2**70, "")):
        before = replace(ProcessId.this(), pid=pid, started="1", machine=machine)
        (tmp_path / "lock.json").write_text(json.dumps(asdict(before)))
        RunLock(tmp_path).require_free()


def test_the_owner_ends_when_another_takes_over(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    other = replace(ProcessId.this(), host="node7\n\x1b", machine="other", job="12")
    (tmp_path / "lock.json").write_text(json.dumps(asdict(other)))
    _, errors = holder.communicate(timeout=20)
    assert holder.returncode == 1
    assert re.search(
        r"process \d+ on node7\\u000a\\u001b \(job 12\) has taken over this run: process \d+ ends",
        errors,
    )


def on_another_machine(folder: Path, *, job: str, age_s: float) -> ProcessId:
    owner = ProcessId("node7", 123, "99", "another boot", job=job, attempt="elsewhere")
    path = folder / "lock.json"
    path.write_text(json.dumps(asdict(owner)))
    beat = time.time() - age_s
    os.utime(path, (beat, beat))
    return owner


def test_on_another_machine_the_age_of_the_beat_decides(tmp_path: Path) -> None:
    on_another_machine(tmp_path, job="8", age_s=run_lock.DEAD_AFTER_S - 20)
    with pytest.raises(RunLocked, match=r"process 123 on node7 \(job 8\)"):
        RunLock(tmp_path).require_free()
    on_another_machine(tmp_path, job="8", age_s=run_lock.DEAD_AFTER_S + 20)
    RunLock(tmp_path).require_free()
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


@tabled(
    "job, host, age_s",
    ids=["the same job requeued", "a time in the future", "a time after 3900", "another boot"],
)
def test_the_beat_is_watched(
    job: str, host: str, age_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(run_lock.socket, "gethostname", lambda: host)
    monkeypatch.setattr(run_lock, "WATCH_S", 1.2)
    owner = on_another_machine(tmp_path, job=job, age_s=age_s)
    RunLock(tmp_path).require_free()  # no beat: it is dead
    monkeypatch.setattr(
        run_lock.time,
        "sleep",
        lambda _: (tmp_path / "lock.json").write_text(
            json.dumps(asdict(replace(owner, beat=owner.beat + 1)))
        ),
    )
    with pytest.raises(RunLocked):
        RunLock(tmp_path).require_free()


def test_other_ranks_know_their_own_run(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(RunLocked):  # another attempt's
        RunLock(tmp_path).require_free()
    monkeypatch.delenv("MASTER_PORT")
    RunLock(tmp_path).require_free()
