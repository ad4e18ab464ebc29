"""tests/gpu on a CPU: what they call must exist, take these arguments, and compute the same numbers. Kernels wait for a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.swapped_device import copy_tests


def run_swapped(folder: Path, *options: str) -> tuple[str, dict[str, int]]:
    """Return what pytest says, and how many tests passed, failed and were skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += f"-p tests.support.swapped_device -c {ROOT}/pyproject.toml".split()
    command += [
        *f"--show-capture=no --tb=short -p tests.support.not_run --rootdir {folder} {folder}".split(),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = finished(command, cwd=ROOT, env=environment, code=None)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout[-300:])
    return done.stdout, {kind: int(number) for number, kind in counts}


def test_each_test_for_gpus_runs_as_far_as_a_cpu_can(tmp_path: Path) -> None:
    copy_tests(ROOT / "tests/gpu", tmp_path)
    said, counts = run_swapped(tmp_path)
    assert not counts.keys() & {"failed", "error", "errors"}, said[-3000:]
    assert counts["passed"] >= 38, said[-3000:]


def test_a_changed_signature_fails(tmp_path: Path) -> None:
    """A stand-in for the fault that six tests had: a function of titan gets an argument that a test does not know."""
    copy_tests(ROOT / "tests/gpu", tmp_path)
    (tmp_path / "conftest.py").write_text(
        "from titan.parallel import block_attention as b\n"
        "old = b.attend_backward\n"
        "b.attend_backward = lambda *a, spec, scaling, **k: old(*a, spec=spec, scale=scaling, **k)\n"
    )
    said, counts = run_swapped(tmp_path, "-k", "test_merged_blocks")
    assert counts["failed"] == 4 and "missing 1 required keyword-only" in said, said[-3000:]
