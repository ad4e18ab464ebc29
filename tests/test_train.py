"""titan/run/train.py: what is known before torch is imported, and names that only torch knows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.jobs import job
from tests.support.tables import tabled
from titan.base.run_folder import write_status
from titan.base.signals import EXIT_FAILED, EXIT_STOPPED, for_agent, signal_main_thread
from titan.run.train import is_finished


def test_a_run_is_finished_with_its_last_step_and_checkpoint(tmp_path: Path) -> None:
    def finished(steps: int = 5, **checkpoint: Any) -> bool:
        return is_finished(job(tmp_path, training={"steps": steps}, checkpoint=checkpoint))

    assert not finished()
    write_status(tmp_path, state="done", exit_code=0, step=5)
    assert not finished()  # its checkpoints were deleted: begin again
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    assert finished() and finished(steps=3)
    assert not finished(steps=6)
    assert not finished(load_step=2)
    assert not finished(enable=False)
    write_status(tmp_path, state="failed", exit_code=1, step=5)
    assert not finished()


def test_a_stopped_rank_ends_with_0_if_torchrun_would_start_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert for_agent(EXIT_STOPPED) == EXIT_STOPPED
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert for_agent(EXIT_STOPPED) == EXIT_STOPPED
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert for_agent(EXIT_STOPPED) == for_agent(EXIT_FAILED) == 0


@tabled("options, line")
def test_a_name_that_torch_does_not_know_ends_the_command_in_one_line(
    options: list[str], line: str, tmp_path: Path
) -> None:
    job_file = Path(__file__).parents[1] / "train_configs" / "demo.toml"
    command = [sys.executable, *f"-m titan.cli train {job_file}".split(), *options]
    folder = f"--job.dump_folder={tmp_path}"
    done = finished([*command, folder], code=2)
    assert done.stderr.splitlines()[-1].startswith(line) and "Traceback" not in done.stderr


STOPPED = """
import faulthandler, os, signal, threading, time
faulthandler.enable()
for _ in range(6):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0)
"""


def test_a_stopped_main_thread_takes_the_signal_itself() -> None:
    """Which os.kill leaves to chance: a third of these took it in another thread."""
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPED], stderr=subprocess.PIPE, text=True
        )
        os.waitpid(process.pid, os.WUNTRACED)
        signal_main_thread(process.pid, signal.SIGABRT)
        os.kill(process.pid, signal.SIGCONT)
        said = process.communicate()[1]
        assert process.returncode == -signal.SIGABRT
        assert re.search(r'Current thread .*\n  File "<string>", line 6 in <module>', said), (
            said
        )
