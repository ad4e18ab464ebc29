"""Start runs that a test strikes, and leave no process of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run in the folder "run" of the test."""
    runs: list[Run] = []

    def start(*settings: str, **options: Any) -> Run:
        runs.append(Run(tmp_path / "run", *settings, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
