"""The commands as a user types them: two ranks under torchrun, a signal, going on, generating."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import Shell, finished
from tests.support.runs import logged_rows

ROOT = Path(__file__).parents[1]
TITAN = [sys.executable, "-m", "titan.cli"]


def titan(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return finished([*TITAN, *arguments], timeout=timeout_s, cwd=ROOT, code=None)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-rank run of the shipped debug job, stopped by SIGTERM to `titan train`, then continued to its end."""
    folder = tmp_path_factory.mktemp("run")
    command = f"train train_configs/debug_model.toml --nproc 2 --job.dump_folder={folder} --training.steps=60 --metrics.log_freq=1 --model.overrides.n_layers=2 --checkpoint.interval=1000 --training.seq_len=64".split()
    process = subprocess.Popen([*TITAN, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    stopped = json.loads((folder / "status.json").read_text())
    assert stopped["state"] == "stopped" and 1 < stopped["step"] < 60
    assert (folder / "checkpoint" / f"step-{stopped['step']}").is_dir()
    finished = titan(*command, "--quiet")
    assert finished.returncode == 0, finished.stderr
    # Of two ranks and their launcher only the last step and the account are heard, and a rank that the machine slowed.
    heard = [
        line for line in finished.stdout.splitlines() if "the others wait for it" not in line
    ]
    assert [line.split()[0] for line in heard] == ["step", "goodput"], finished.stdout
    return folder


def test_stopped_and_continued_run_has_every_step_once(run_dir: Path) -> None:
    rows = logged_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
    assert (run_dir / "logs" / "rank-1.log").exists()


def test_a_finished_run_is_resumed_as_nothing(run_dir: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in run_dir.rglob("*")
        }

    before = files()
    for options in ((), ("--nproc", "2"), ("--nproc", "2", "--max-restarts", "1")):
        again = titan("train", str(run_dir / "config.toml"), *options)
        assert (again.returncode, again.stderr) == (0, "")
        assert again.stdout == "nothing to do: all 60 steps are done\n"
    assert files() == before


def test_no_process_is_left(run_dir: Path) -> None:
    ours = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(run_dir).encode() in _read(path) and path.parent.name != str(os.getpid())
    ]
    assert not ours


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # ended while we looked
        return b""


def test_generate_from_the_run_and_from_a_step(run_dir: Path, shell: Shell) -> None:
    words = ("--prompt", "def ", "--max-new-tokens", "40")
    whole = titan("generate", "--checkpoint", str(run_dir), *words)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.startswith("def ") and len(whole.stdout) > 20
    step = run_dir / "checkpoint" / "step-60"
    # The same seed and the same step.
    assert shell(f"generate --checkpoint {step}", *words).out == whole.stdout
    assert shell.refuse(f"generate --checkpoint {run_dir.parent}/nothing").count("\n") == 1


def test_missing_data_is_the_users_mistake_in_both_ranks(tmp_path: Path) -> None:
    result = titan(
        "train",
        "train_configs/debug_model.toml",
        "--nproc",
        "2",
        f"--job.dump_folder={tmp_path}",
        "--training.dataset=text",
        f"--training.dataset_path={tmp_path}/nothing",
    )
    assert result.returncode == 2
    assert "nothing" in result.stderr.splitlines()[0]
