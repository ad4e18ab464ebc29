"""Fixtures for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm gloo ranks; see pool.py."""
    ranks = Pool()
    yield ranks
    ranks.close()
