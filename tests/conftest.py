"""Fixtures for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Return the pool of warm gloo ranks; see tests/support/ranks.py."""
    return Pool()


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """titan.train.main, where a test calls it in this process, listens to signals for good."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
