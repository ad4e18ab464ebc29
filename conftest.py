"""Fixtures for every test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Pool

# Before torch is imported, and for the runs that tests start: the models are so small that a second thread costs
# more than it does, above all beside another worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = [
    "tests.support.commands",
    "tests.support.lanes",
    "tests.support.not_run",
    "tests.support.costs",
    "tests.support.forks",
]

CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Create an empty cache for the traces and texts of the run: a program is recorded once for all tests."""
    config.stash[CACHE] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="titan-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The files that take longest come first: the forks of scripts/test.sh then end together.
    from tests.support.costs import CHEAP
    from tests.support.lanes import cost_of, read_costs

    costs, of_file = read_costs(), dict[Path, float]()
    for item in items:
        cost = CHEAP / 10 + cost_of(item.nodeid, costs)
        of_file[item.path] = of_file.get(item.path, 0.0) + cost
    items.sort(key=lambda item: -of_file[item.path])


@pytest.fixture(scope="session")
def pool() -> Pool:
    """Return the pool of warm gloo ranks; see tests/support/ranks.py."""
    return Pool()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process the one rank of a default process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Undo what commands do to their process, where a test calls them in this one: signals, and variables such as --quiet's."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    variables = dict(os.environ)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
