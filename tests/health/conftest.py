"""Start runs that a test strikes, and leave no process of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import CLI, Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run in the folder "run" of the test."""
    runs: list[Run] = []

    def start(*settings: str, program: list[str] = CLI, **variables: str) -> Run:
        runs.append(Run(tmp_path / "run", *settings, program=program, **variables))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
