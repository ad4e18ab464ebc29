"""Report of the tests that did not run and why, of the expensive ones that were drawn, and of the age of the last full lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.lanes import DRAWN, FULL, LEFT_OUT, git, tomllib

# The markers that pyproject.toml leaves out; a test that has two of them counts for the first.
MARKERS = {
    "gpu": "need an accelerator: pytest -m gpu",
    "slow": "slow: pytest -m slow",
}
DESELECTED = pytest.StashKey[Counter[str]]()
OLD = 50  # commits


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marked = (why for marker, why in MARKERS.items() if item.get_closest_marker(marker))
        why = item.stash.get(LEFT_OUT, None) or next(
            marked, "not selected by this command line"
        )
        item.config.stash[DESELECTED][why] += 1


# The first of the wrappers, so that the lines follow pytest's summary, next to its closing line.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    yield
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    found = lines(config.stash[DESELECTED], skipped)
    if drawn := config.stash.get(DRAWN, []):
        found += [*drawn_lines(drawn), *full_lane()]
    for line in found:
        terminalreporter.write_line(line)


def lines(deselected: Mapping[str, int], skipped: Mapping[str, int]) -> list[str]:
    """Return a line for each reason, the largest group first."""
    groups = Counter(deselected) + Counter(skipped)
    return [f"did not run: {count} ({reason})" for reason, count in groups.most_common()]


def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def drawn_lines(drawn: list[str]) -> list[str]:
    """Return a line for each file with the dear tests that its commit has drawn, so that a red one can be named."""
    files: dict[str, list[str]] = {}
    for test in drawn:
        name, _, row = test.partition("::")
        files.setdefault(name, []).append(row)
    named = [f"  {name}: {', '.join(rows)}" for name, rows in sorted(files.items())]
    return [f"drawn by commit {git('rev-parse', '--short', 'HEAD')}: {len(drawn)}", *named]


def full_lane() -> list[str]:
    """Return a line if the last complete run of the full lane is old, or if there was none."""
    if not FULL.exists():
        return ["the full lane has not run: scripts/pieces.py"]
    last = tomllib.loads(FULL.read_text(encoding="utf-8"))
    counted = git("rev-list", "--count", f"{last['commit']}..HEAD")
    if not counted:  # no clone, or one that does not reach back so far
        return []
    commits = int(counted)
    old = f"the full lane ran {commits} commits ago: scripts/pieces.py"
    return [old] if commits > OLD else []
