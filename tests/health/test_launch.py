"""titan/ops/launch.py: signals go down to the ranks, and their exit code comes back up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.commands import finished
from titan.base.errors import LOST_CONNECTION
from titan.base.run_folder import RunFolder, State, write_status
from titan.ops import launch

FAKE_TORCHRUN = """
import json, os, signal, subprocess, sys, time
if "titan.train" not in sys.argv[1:2]:  # torchrun: starts a rank, and ends with 1 whatever that says
    rank = subprocess.Popen([sys.executable, __file__, "titan.train", sys.argv[-1]], start_new_session=True)
    sys.exit(1 if rank.wait() else 0)
def stop(number, frame):
    status = {"state": "stopped", "exit_code": 75, "signal": number, "threads": os.environ["OMP_NUM_THREADS"]}
    open(sys.argv[2] + "/status.json", "w").write(json.dumps(status))
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
open(sys.argv[2] + "/ready", "w").close()
time.sleep(30)
"""
LAUNCH = """
import sys
from titan.ops import launch
class Popen(launch.subprocess.Popen):
    def __init__(self, command, **kwargs):
        assert command[1:5] == ["-m", "titan.ops.launch", "--standalone", "--nproc-per-node=2"], command
        super().__init__([sys.executable, sys.argv[1], *command[5:]], **kwargs)
launch.subprocess.Popen = Popen
sys.exit(launch.launch([sys.argv[2]], num_processes=2, dump_folder=sys.argv[2]))
"""


def test_a_signal_reaches_the_ranks_and_their_exit_code_comes_back(tmp_path: Path) -> None:
    torchrun, run = tmp_path / "torchrun.py", tmp_path / "run"
    torchrun.write_text(FAKE_TORCHRUN)
    run.mkdir()
    (run / "status.json").write_text('{"state": "stopped", "exit_code": 2}')  # an older run's
    environment = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    }
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(torchrun), str(run)], env=environment
    )
    try:
        for _ in range(300):
            if (run / "ready").exists():
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 75
    finally:
        process.kill()
    status = json.loads((run / "status.json").read_text())
    assert status["signal"] == signal.SIGUSR1
    assert int(status["threads"]) >= 1


def test_nothing_follows_what_a_rank_said(tmp_path: Path) -> None:
    """Packages such as triton list what lives when an interpreter ends."""
    (rank := tmp_path / "rank.py").write_text(
        "import os\nos.write(1, b'the reason')\nos._exit(2)\n"
    )
    program = "import atexit, runpy; atexit.register(print, 'leaked'); runpy.run_module('titan.ops.launch', run_name='__main__')"
    command = [sys.executable, "-c", program, "--standalone", str(rank)]
    done = finished(command, code=None)
    assert (done.returncode, done.stdout) == (2, "the reason")


def end_launch(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of Python in torchrun's place."""
    real = subprocess.Popen
    monkeypatch.setattr(
        launch.subprocess,
        "Popen",
        lambda command, **kwargs: real(
            [sys.executable, "-c", f"import sys; {end}", *command[5:]], **kwargs
        ),
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(1)", 1),
        (
            "open(sys.argv[-1] + '/status.json', 'w').write('{\"exit_code\": 2}'); sys.exit(1)",
            2,
        ),
    ],
)
def test_exit_codes_of_a_launch(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text(
        '{"state": "stopped", "exit_code": 75}'
    )  # an older run's
    end_launch(end, monkeypatch)
    assert launch.launch([str(tmp_path)], num_processes=2, dump_folder=str(tmp_path)) == code
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_killed_torchrun_is_told_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_launch("import os; os.kill(os.getpid(), 9)", monkeypatch)
    ends: dict[State, State] = {"running": "failed", "done": "done"}
    for state, left in ends.items():
        write_status(tmp_path, state=state, step=7)
        assert launch.launch([], num_processes=2, dump_folder=str(tmp_path)) == 1
        [said] = capsys.readouterr().err.splitlines()
        assert "which `titan train` starts the ranks with, was ended by SIGKILL" in said
        status = RunFolder(tmp_path).status
        assert (status.state, status.step) == (left, 7)
    assert status.reason == ""  # pyrefly: ignore[unbound-name]


@pytest.mark.parametrize(
    ("waited_s", "reason"), [(0, "rank 1 (pid 7) was ended by SIGKILL"), (60, "reset")]
)
def test_a_killed_rank_outranks_the_reports_of_its_peers(
    waited_s: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one that torchrun itself has killed, after half a minute."""
    write_status(tmp_path, state="failed", exit_code=1, reason="reset", kind=LOST_CONNECTION)
    later = time.time() + waited_s
    monkeypatch.setattr(launch.time, "time", lambda: later)
    failures = {
        n: SimpleNamespace(pid=6 + n, exitcode=code, timestamp=0)
        for n, code in ((0, 1), (1, -9))
    }
    job = ["train_configs/debug_model.toml", f"--job.dump_folder={tmp_path}"]
    launch._write_failures(job, failures, num_oom_kills=0)
    assert RunFolder(tmp_path).status.reason == reason
