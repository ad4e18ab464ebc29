"""Say at the end of a test run what it cost: CPU seconds by file, of the tests' processes and all that they started.

    pytest --costs FILE      compare with that table, and write it anew; scripts/test.sh keeps one in tests/costs.toml

CPU seconds depend less on what else a machine does than seconds of a clock. They are for reading: no test fails by them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
COSTS = pytest.StashKey[Counter[str]]()


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process, of its descendants, and of those that they have waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has just ended
            continue
        fields = text.rpartition(")")[2].split()
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total = 0
    for process in ticks:
        ancestor = process
        while ancestor not in (0, root):
            ancestor = parents.get(ancestor, 0)
        if ancestor == root:
            total += ticks[process]
    return total / TICKS


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COSTS] = Counter()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds(os.getpid())
    result = yield
    item.config.stash[COSTS][item.nodeid] += max(0.0, cpu_seconds(os.getpid()) - before)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["costs"] = dict(session.config.stash[COSTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[COSTS].update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    import json

    if to := os.environ.get("COSTS_TO"):
        Path(to).write_text(json.dumps(config.stash[COSTS]))
