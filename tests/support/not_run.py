"""Say at the end of a test run which tests did not run, and why: one line for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.lanes import LEFT_OUT

# The markers that pyproject.toml leaves out; a test that has two of them counts for the first.
MARKERS = {
    "gpu": "need an accelerator: pytest -m gpu",
    "slow": "slow: pytest -m slow",
}
DESELECTED = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marked = (why for marker, why in MARKERS.items() if item.get_closest_marker(marker))
        why = item.stash.get(LEFT_OUT, None) or next(
            marked, "not selected by this command line"
        )
        item.config.stash[DESELECTED][why] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker of pytest-xdist; the process that prints has collected nothing.
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = dict(session.config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every worker collects all tests, so that the last one says the same as the others.
    deselected = getattr(node, "workeroutput", {}).get("deselected")
    if deselected is not None:
        node.config.stash[DESELECTED] = Counter(deselected)


# The first of the wrappers, so that the lines follow pytest's summary, next to its closing line.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    yield
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for line in lines(config.stash[DESELECTED], skipped):
        terminalreporter.write_line(line)


def lines(deselected: Mapping[str, int], skipped: Mapping[str, int]) -> list[str]:
    """Return a line for each reason, the largest group first."""
    groups = Counter(deselected) + Counter(skipped)
    return [f"did not run: {count} ({reason})" for reason, count in groups.most_common()]


def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")
