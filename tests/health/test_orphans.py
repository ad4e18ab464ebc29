"""Every command that starts ranks or workers, killed by each signal: no process is left two seconds later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.tables import table
from titan.cli import main as titan

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FILE = "train_configs/debug_model.toml"
OPTIONS = table(__file__, "options")
# Words of a command, and how many processes it has when it is struck. {run} is a run of two ranks.
COMMANDS = table(__file__, "commands")
CHEAP = ("prepare", "sim")
# A run that is asked to stop ends its step and saves, within its grace time.
GRACEFUL = ("train", "train of groups", "sweep", "compare")


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment, whoever is their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_for(ready: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not (is_ready := ready()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_ready


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    text = folder / "text.txt"
    text.write_text("a few words in a line\n" * 2**20)
    return {"text": text, "run": folder / "run"}


def cases() -> list[object]:
    return [
        pytest.param(
            name,
            number,
            id=f"{name}-{number.name}",
            marks=[pytest.mark.slow] * (name not in CHEAP),
        )
        for name in COMMANDS
        for number in SIGNALS
        if number == signal.SIGKILL or name not in GRACEFUL
    ]


@pytest.mark.parametrize(("name", "number"), cases())
def test_no_process_outlives_its_launcher(
    name: str, number: signal.Signals, places: dict[str, Path], tmp_path: Path
) -> None:
    words, count = COMMANDS[name]
    if "{run}" in words and not places["run"].exists():
        run = f"train {FILE} {OPTIONS} --training.steps=40 --nproc=2 --job.dump_folder={places['run']}"
        assert titan(run.split()) == 0
    text = (ROOT / FILE).read_text()
    (tmp_path / "other.toml").write_text(text.replace("8e-4", "1e-4"))
    mark = str(uuid.uuid4())
    environment = {**os.environ, "MARK": mark, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "said.txt").open("w") as said:
        command = [
            sys.executable,
            "-m",
            "titan.cli",
            *words.format(tmp=tmp_path, file=FILE, options=OPTIONS, **places).split(),
        ]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    assert wait_for(lambda: len(marked(mark)) >= count or process.poll() is not None, 120)
    assert process.poll() is None, (tmp_path / "said.txt").read_text()
    process.send_signal(number)
    try:
        # 2 s on idle cores; what is not asked to end never does.
        gone = wait_for(lambda: process.poll() is not None and not marked(mark), 30)
        assert gone, [Path(f"/proc/{pid}/cmdline").read_text() for pid in marked(mark)]
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
