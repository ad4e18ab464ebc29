"""Choose which tests run: three lanes, by the table tests/lanes.toml.

    pytest                     the default lane
    pytest --lane quick        no ranks and no processes: for every save
    pytest --lane full         all that is not marked `slow` or `gpu`
    pytest --touched COMMIT    the default lane, and all tests of what has changed since that commit
    pytest tests/sim           what is named on the command line runs whole

The longest row that begins a test's id decides. A test without a row is in the default lane.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LANES = ("quick", "default", "full")
TABLE = Path(__file__).parents[1] / "lanes.toml"
LEFT_OUT = pytest.StashKey[str]()


def read_table() -> dict[str, Any]:
    """Return tests/lanes.toml: `lanes` (beginning of an id -> lane) and `touched` (pattern of paths -> tests)."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    lanes: dict[str, str] = {}
    for lane, beginnings in table["lanes"].items():
        if lane not in LANES:
            raise ValueError(f"{TABLE}: no lane {lane}")
        lanes |= dict.fromkeys(beginnings, lane)
    return {"lanes": lanes, "touched": table["touched"]}


def lane_of(test: str, lanes: Mapping[str, str]) -> str:
    """Return the lane of a test by its id, such as "tests/test_loss.py::test_sum[2]"."""
    rows = [row for row in lanes if test.startswith(row)]
    return lanes[max(rows, key=len)] if rows else "default"


def touched_tests(paths: Iterable[str], touched: Mapping[str, list[str]]) -> list[str]:
    """Return how the ids begin of the tests that a change of these files asks for."""
    paths = list(paths)
    named = {
        test
        for path in paths
        for pattern, tests in touched.items()
        if fnmatch(path, pattern)
        for test in tests
    }
    named |= {path for path in paths if fnmatch(path, "t*/test_*.py")}
    return sorted(named)


def _changed(commit: str) -> list[str]:
    command = ["git", "diff", "--name-only", commit]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TABLE.parent)
    return run.stdout.splitlines()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, help="which tests run: tests/lanes.toml")
    help = "run all tests of the files changed since this commit, too: tests/lanes.toml"
    parser.addoption("--touched", metavar="COMMIT", help=help)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The quick lane imports no file that holds none of its tests: importing all of them takes longer than the lane.
    if config.getoption("--lane") != "quick" or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    lanes = read_table()["lanes"]
    return (
        not any(row.startswith(name) for row, lane in lanes.items() if lane == "quick") or None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    whole = config.args == config.getini("testpaths")
    table = read_table()
    lanes = table["lanes"]
    complete = whole and config.getoption("--lane") != "quick" and not session.testsfailed
    if complete and (unused := _unused(items, lanes)):
        raise pytest.UsageError(f"{TABLE}: no test begins with {', '.join(unused)}")
    lane = config.getoption("--lane") or ("default" if whole else "full")
    runs = LANES[: LANES.index(lane) + 1]
    since = config.getoption("--touched")
    touched = tuple(touched_tests(_changed(since), table["touched"])) if since else ()
    kept, left = [], []
    for item in items:
        # A test that -m names runs in every lane.
        named = any(item.get_closest_marker(marker) for marker in ("slow", "gpu"))
        runs_in = lane_of(item.nodeid, lanes)
        if named or runs_in in runs or item.nodeid.startswith(touched):
            kept.append(item)
        else:
            item.stash[LEFT_OUT] = f"{runs_in} lane: pytest --lane {runs_in}"
            left.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def _unused(items: list[pytest.Item], lanes: Mapping[str, str]) -> list[str]:
    return [row for row in lanes if not any(item.nodeid.startswith(row) for item in items)]
