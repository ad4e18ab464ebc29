"""Runs of megatron-core for tests: each variant of megatron_run.py is trained once, by the first test that asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("megatron_run.py")
LIMIT_S = 240


@dataclass(frozen=True)
class MegatronRun:
    """A run of Megatron.

    Attributes:
        folder: its run folder, with latest_checkpointed_iteration.txt.
        reference: what megatron_run.py says: "tokens", "steps" and "state", each by step.
    """

    folder: Path
    reference: dict[str, Any]


def train_megatron(out: Path, variant: str) -> MegatronRun:
    """Train a variant in new processes.

    Args:
        out: an empty folder.
        variant: a row of megatron_run.VARIANTS.
    """
    with (out / "log.txt").open("w+") as log:
        # Megatron's writers are processes of their own, which a kill of the first would leave.
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(out), variant],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        log.seek(0)
        assert code == 0, log.read()[-4000:]
    reference = torch.load(out / "reference.pt", weights_only=True)
    return MegatronRun(out / "run", reference)


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MegatronRun]:
    """Return a function that trains a variant, or returns the run that it made before."""
    for package in ("megatron.core", "psutil"):
        pytest.importorskip(package)
    runs: dict[str, MegatronRun] = {}

    def run(variant: str) -> MegatronRun:
        if variant not in runs:
            runs[variant] = train_megatron(tmp_path_factory.mktemp("megatron"), variant)
        return runs[variant]

    return run
