"""Choose which tests run: three lanes, by the table tests/lanes.toml.

    pytest                     the default lane: all cheap tests, and as many dear ones as `budget` allows, drawn by the commit
    pytest --draw COMMIT       with the dear tests of that commit
    pytest --lane quick        no ranks and no processes: for every save
    pytest --lane full         all that is not marked `slow` or `gpu`
    pytest --touched COMMIT    the default lane, and all tests of what has changed since that commit
    pytest --promises          all tests of tests/promises.toml, slow ones too, and its commands; those that need a GPU are listed
    pytest tests/sim           what is named on the command line runs whole

The longest row that begins a test's id decides. Of tests without a row, and of the rows `drawn`, the cheap ones are in the
default lane, and those in tests/costs.toml are drawn. Those that prove a promise for little always run.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import finished

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LANES = ("quick", "default", "full")
TABLE = Path(__file__).parents[1] / "lanes.toml"
COSTS, FULL = TABLE.with_name("costs.toml"), TABLE.with_name("full.toml")
PROMISES = TABLE.with_name("promises.toml")
LEFT_OUT = pytest.StashKey[str]()
DEAR = 10.0  # CPU seconds of a test, which has a reason in the default lane
LITTLE = 2.0  # CPU seconds of a test that proves a promise, and so is not drawn
DRAWN = pytest.StashKey[list[str]]()


def read_table() -> dict[str, Any]:
    """Return tests/lanes.toml: `lanes` (beginning of an id -> lane) and `touched` (pattern of paths -> tests)."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    lanes: dict[str, str] = {}
    for lane, beginnings in table["lanes"].items():
        if lane not in (*LANES, "drawn"):
            raise ValueError(f"{TABLE}: no lane {lane}")
        lanes |= dict.fromkeys(beginnings, lane)
    return table | {"lanes": lanes}


def read_promises() -> dict[str, Any]:
    """Return tests/promises.toml."""
    return tomllib.loads(PROMISES.read_text(encoding="utf-8"))


def promised_tests() -> list[str]:
    """Return the ids of the tests that prove promises; one without a row in brackets means all of its function's."""
    return [test for row in read_promises()["promise"] for test in row.get("tests", ())]


def is_promised(test: str, promised: Container[str]) -> bool:
    """Return whether a test by its id proves a promise, by its row or by its function."""
    return test in promised or test.partition("[")[0] in promised


def read_costs() -> dict[str, float]:
    """Return tests/costs.toml: function of tests, or one row -> CPU seconds of a row."""
    return tomllib.loads(COSTS.read_text(encoding="utf-8"))["cpu_seconds"]


def cost_of(test: str, costs: Mapping[str, float]) -> float:
    """Return the CPU seconds of a test by its id, 0 if it is cheap or new."""
    return costs.get(test, costs.get(test.partition("[")[0], 0.0))


def draw(
    costs: Mapping[str, float], *, seed: str, budget: float, techniques: Iterable[str]
) -> set[str]:
    """Draw tests until their costs reach the budget, so that each technique is in the name of one at least.

    Args:
        costs: id of a test -> CPU seconds.
        seed: the same seed draws the same tests.
        budget: CPU seconds.
        techniques: words of ids.
    """
    order = sorted(costs, key=lambda test: sha256(f"{seed} {test}".encode()).digest())
    chosen: set[str] = set()
    for technique in techniques:
        have = [test for test in order if technique in test.partition("[")[2]]
        if have and chosen.isdisjoint(have):
            chosen.add(have[0])
    spent = sum(costs[test] for test in chosen)
    for test in order:
        if test not in chosen and spent + costs[test] <= budget:
            chosen.add(test)
            spent += costs[test]
    return chosen


def row_of(test: str, lanes: Mapping[str, str]) -> str | None:
    """Return the longest row of the table that begins a test's id, such as "tests/test_loss.py::test_sum[2]"."""
    rows = [row for row in lanes if test.startswith(row)]
    return max(rows, key=len, default=None)


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


def _lane(config: pytest.Config) -> str:
    """Return the lane that runs. What is named on the command line is in the full one."""
    is_whole = config.args == config.getini("testpaths") and not config.getoption("--promises")
    return config.getoption("--lane") or ("default" if is_whole else "full")


def _changed(commit: str) -> list[str]:
    if not git("rev-parse", "--verify", "--quiet", commit):
        raise pytest.UsageError(f"--touched {commit}: git knows no such commit")
    return git("diff", "--name-only", commit).splitlines()


def git(*arguments: str) -> str:
    """Return what git says; nothing where this is no clone."""
    command = ["git", *arguments]
    run = finished(command, cwd=TABLE.parent, code=None)
    return run.stdout.strip()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--promises"):
        # Slow tests too. _keep_promised leaves out those that need a GPU.
        config.option.markexpr = ""
    if _lane(config) == "default":
        os.environ.setdefault("TITAN_PARITY_STEPS", "3")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, help="which tests run: tests/lanes.toml")
    parser.addoption("--draw", metavar="COMMIT", help="draw the dear tests as for this commit")
    help = "run the tests of all promises, slow ones too: tests/promises.toml"
    parser.addoption("--promises", action="store_true", help=help)
    help = "run all tests of the files changed since this commit, too: tests/lanes.toml"
    parser.addoption("--touched", metavar="COMMIT", help=help)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The quick lane imports no file that holds none of its tests: importing all of them takes longer than the lane.
    is_quick = config.getoption("--lane") == "quick" and not config.getoption("--promises")
    if not is_quick or collection_path.suffix != ".py":
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
    if config.getoption("--promises"):
        _keep_promised(config, items)
        return
    lane = _lane(config)
    whole = config.args == config.getini("testpaths")
    table = read_table()
    lanes: dict[str, str] = table["lanes"]
    of_file: dict[str, dict[str, str]] = {}
    for row, of in lanes.items():
        of_file.setdefault(row.partition("::")[0], {})[row] = of
    complete = whole and config.getoption("--lane") != "quick" and not session.testsfailed
    # tests/test_promises.py looks for functions; the rows of a function are known here.
    named = [*lanes, *(test for test in promised_tests() if "[" in test)]
    if complete and (unused := _unused(items, named)):
        text = f"{TABLE} or {PROMISES.name}: no test begins with {', '.join(unused)}"
        raise pytest.UsageError(text)
    runs = LANES[: LANES.index(lane) + 1]
    since = config.getoption("--touched")
    touched = tuple(touched_tests(_changed(since), table["touched"])) if since else ()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    dear: dict[str, float] = {}
    costs = read_costs() if lane == "default" else {}
    promised, of_promises = {*promised_tests()}, 0.0
    for item in items:
        # A test that -m names runs in every lane.
        named = any(item.get_closest_marker(marker) for marker in ("slow", "gpu"))
        row = row_of(item.nodeid, of_file.get(item.nodeid.partition("::")[0], {}))
        runs_in = lanes[row] if row else "drawn"
        cost = cost_of(item.nodeid, costs)
        if runs_in == "drawn":
            runs_in = "full" if cost > DEAR else "default"
            is_proof = cost <= LITTLE and is_promised(item.nodeid, promised)
            of_promises += cost * is_proof
            always = is_proof or named or item.nodeid.startswith(touched)
            if cost and cost <= DEAR and not always:
                dear[item.nodeid] = cost
        if named or runs_in in runs or item.nodeid.startswith(touched):
            kept.append(item)
        else:
            item.stash[LEFT_OUT] = f"{runs_in} lane: pytest --lane {runs_in}"
            left.append(item)
    if dear:
        seed = config.getoption("--draw") or git("rev-parse", "--short", "HEAD")
        settings = {name: table["draw"][name] for name in ("budget", "techniques")}
        settings["budget"] -= of_promises
        drawn = draw(dear, seed=seed, **settings)
        for item in kept:
            if item.nodeid in dear and item.nodeid not in drawn:
                item.stash[LEFT_OUT] = f"not drawn by commit {seed}: pytest --lane full"
                left.append(item)
        kept = [item for item in kept if LEFT_OUT not in item.stash]
        config.stash[DRAWN] = [item.nodeid for item in kept if item.nodeid in drawn]
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def _keep_promised(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all but the tests of promises that this machine can run."""
    promised = {*promised_tests(), "tests/test_promises.py::test_commands"}
    for item in items:
        if not is_promised(item.nodeid, promised):
            item.stash[LEFT_OUT] = "proves no promise"
        elif item.get_closest_marker("gpu"):
            item.stash[LEFT_OUT] = f"{item.nodeid} needs an accelerator: pytest -m gpu"
    config.hook.pytest_deselected(items=[item for item in items if LEFT_OUT in item.stash])
    items[:] = [item for item in items if LEFT_OUT not in item.stash]


def _unused(items: list[pytest.Item], lanes: Iterable[str]) -> list[str]:
    ids = sorted(item.nodeid for item in items)
    firsts = {row: ids[bisect_left(ids, row) :][:1] for row in lanes}
    return [row for row, first in firsts.items() if not (first and first[0].startswith(row))]
