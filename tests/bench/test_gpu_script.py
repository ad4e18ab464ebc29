"""scripts/bench/gpu.sh with a stand-in for Python: what is cut, what the next call does, and what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.jobs import ROOT

ONLY = "machine speed-1B calibrate tests"
# A stub for Python: each call returns at once, except one test file, which ignores all signals.
STUB = """#!/bin/bash
case "$*" in
  *test_cuda_memory*) trap '' TERM; while [ -d "$HANG" ]; do sleep 0.2; done ;;
  *) echo "stub: $1" ;;
esac
"""
FIGURES = {"machine", "speed-1B", "calibrate"}
TESTS = {f"tests-{path.stem}" for path in ROOT.glob("tests/gpu/test_*.py")}
HUNG = "tests-test_cuda_memory"


def start(tmp_path: Path, folder: str, limit_s: int, *, hang: bool = True) -> subprocess.Popen[str]:
    stub, saved = tmp_path / "python", tmp_path / "saved"
    stub.write_text(STUB)
    stub.chmod(0o755)
    if hang:
        (tmp_path / "hang").mkdir(exist_ok=True)
    variables = {"PYTHON": stub, "HANG": tmp_path / "hang", "ONLY": ONLY, "GRACE_S": "1"}
    variables |= {"LIMIT_S": limit_s, "SAVE_TO": saved, "RESUME_FROM": saved}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen(
        ["bash", ROOT / "scripts/bench/gpu.sh", tmp_path / folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.done")}


def begun(said: str) -> list[str]:
    return [line.split()[0] for line in said.splitlines() if line.endswith(" ...")]


def test_a_part_that_never_ends(tmp_path: Path) -> None:
    """All others are measured; it comes last in the next call, on another machine, and is then given up."""
    said, _ = start(tmp_path, "0", 40).communicate()
    assert done(tmp_path / "0") >= FIGURES and HUNG not in done(tmp_path / "0"), said
    assert f"{HUNG}: cut after" in said
    # One more call, or a few on a slow machine.
    for call in "12345":
        assert "complete" not in said
        said, _ = start(tmp_path, call, 40).communicate()
        assert begun(said)[0] == "machine" and not FIGURES & {*begun(said)[1:]}, said
        if HUNG in begun(said):
            break
    assert begun(said)[-1] == HUNG and done(tmp_path / call) == FIGURES | TESTS, said
    assert "given up, cut twice" in said and "complete: " in said
    assert "given up, cut twice" in (tmp_path / "saved/report.md").read_text()


def test_a_machine_that_is_taken_away(tmp_path: Path) -> None:
    """Finished parts are saved. The part that was running comes last in the next call."""
    first = start(tmp_path, "0", 300)
    while not (tmp_path / "0" / f"{HUNG}.log").exists():
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (tmp_path / "hang").rmdir()
    said, _ = start(tmp_path, "1", 300, hang=False).communicate()
    assert FIGURES.isdisjoint(begun(said)[1:]) and begun(said)[-1] == HUNG, said
    assert done(tmp_path / "1") == FIGURES | TESTS and "complete: " in said


def test_missing_packages_are_named_before_any_part(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    run = subprocess.run(
        ["bash", ROOT / "scripts/bench/gpu.sh", tmp_path / "out"],
        env={**os.environ, "PYTHON": str(bare)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2, run.stderr
    assert "missing: torchao, which rows with float8 need" in run.stdout
    *_, last = run.stdout.splitlines()
    assert {"torch,", "numpy,", "pydantic,", "tiktoken,"} <= set(last.split()), last
    assert not done(tmp_path / "out") and "..." not in run.stdout
