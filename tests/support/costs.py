"""Report of what a test run cost: CPU seconds by file, of the tests' processes and all that they started.

    pytest --write-costs      keep what each function cost in tests/costs.toml, which the next run compares with

CPU seconds depend less on what else a machine does than seconds of a clock. They are for reading and for the draw of
tests/support/lanes.py: no test fails by them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.lanes import COSTS, DEAR, cost_of, read_costs, read_table

TICKS = os.sysconf("SC_CLK_TCK")
SPENT = pytest.StashKey[dict[str, float]]()
# Fewer tests than these are no run of a lane.
MANY = 100
FILES = 25  # so many of the dearest files are printed
CHEAP = 0.5  # CPU seconds of a test
ABOUT = """\
# CPU seconds of a row of each function of tests, if it takes half a second or more. `pytest --write-costs` keeps them. The default lane
# draws among these tests: tests/support/lanes.py.

[cpu_seconds]"""


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process, of its descendants, and of those that they have waited for."""
    total, left = 0, [root]
    for process in left:
        try:
            text = Path(f"/proc/{process}/stat").read_bytes()
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                left += map(int, children.read_bytes().split())
        except OSError:  # it has just ended
            continue
        total += sum(map(int, text.rpartition(b")")[2].split()[11:15]))
    return total / TICKS


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "write what each function of tests cost into tests/costs.toml"
    parser.addoption("--write-costs", action="store_true", help=help)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SPENT] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    before = cpu_seconds(os.getpid())
    result = yield
    item.config.stash[SPENT][item.nodeid] = max(0.0, cpu_seconds(os.getpid()) - before)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    spent = config.stash[SPENT]
    if len(spent) < MANY:
        return
    known = read_costs()
    for line in report(spent, known, reasons=read_table()["reasons"]):
        terminalreporter.write_line(line)
    if config.getoption("--write-costs"):
        write(known | means(spent))


# ---- texts -----------------------------------------------------------------------------------------


def means(spent: Mapping[str, float]) -> dict[str, float]:
    """Return CPU seconds: of each row over DEAR, and the mean of the others of each function, by its id without brackets."""
    rows: dict[str, list[float]] = {}
    for test, seconds in spent.items():
        rows.setdefault(test if seconds > DEAR else test.partition("[")[0], []).append(seconds)
    return {test: round(sum(each) / len(each), 1) for test, each in rows.items()}


def report(
    spent: Mapping[str, float], known: Mapping[str, float], *, reasons: Mapping[str, str]
) -> list[str]:
    """Return lines: the dearest files beside what the table says of the same tests, then tests over DEAR without a reason."""
    files: dict[str, float] = {}
    before: dict[str, float] = {}
    for test, seconds in spent.items():
        name, _, _ = test.partition("::")
        files[name] = files.get(name, 0.0) + seconds
        before[name] = before.get(name, 0.0) + cost_of(test, known)
    lines = [
        f"CPU seconds: {sum(spent.values()):.0f}, of which in (tests/costs.toml in brackets)"
    ]
    for name, seconds in sorted(files.items(), key=lambda pair: -pair[1])[:FILES]:
        lines.append(f"{seconds:7.1f} ({before[name]:.1f}) {name}")
    for name, seconds in files.items():
        if seconds > 2 * before[name] + DEAR:
            lines.append(
                f"dearer than tests/costs.toml knows: {name}, {seconds:.1f} ({before[name]:.1f})"
            )
    for test, seconds in spent.items():
        if seconds > DEAR and not test.startswith(tuple(reasons)):
            lines.append(
                f"{seconds:.1f} CPU seconds, and no reason in tests/lanes.toml: {test}"
            )
    return lines


def write(costs: Mapping[str, float]) -> None:
    """Write tests/costs.toml: the functions of which a row costs CHEAP or more."""
    rows = [
        f"{json.dumps(test)} = {seconds}"
        for test, seconds in sorted(costs.items())
        if seconds >= CHEAP
    ]
    COSTS.write_text("\n".join([ABOUT, *rows]) + "\n", encoding="utf-8")
