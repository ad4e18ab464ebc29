"""The table of lanes, what a change adds, and the check of types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.lanes import draw, is_promised, read_table, row_of, touched_tests

ROOT = Path(__file__).parents[1]


def test_the_longest_row_decides() -> None:
    lanes = {"tests/a": "full", "tests/a/test_b.py::test_c[x]": "default"}
    assert row_of("tests/a/test_b.py::test_c[x]", lanes) == "tests/a/test_b.py::test_c[x]"
    assert row_of("tests/a/test_b.py::test_c[y]", lanes) == "tests/a"
    assert row_of("tests/other.py::test_e", lanes) is None


def test_each_commit_draws_other_tests_and_each_technique() -> None:
    costs = {f"test[{n}{'TP' if n == 7 else ''}]": 1.0 + n % 3 for n in range(60)}
    drawn = [draw(costs, seed=s, budget=30, techniques=["TP", "CP"]) for s in "aab"]
    assert drawn[0] == drawn[1] != drawn[2]
    for tests in drawn:
        assert "test[7TP]" in tests and 27 < sum(costs[test] for test in tests) <= 30
    # In the long run each test has its turn.
    commits = [draw(costs, seed=f"{n}", budget=30, techniques=[]) for n in range(60)]
    assert set().union(*commits) == costs.keys()


def test_a_promise_names_a_row_or_a_function() -> None:
    promised = {"test_a.py::test_b[x]", "test_a.py::test_c"}
    ids = ("test_b[x]", "test_b[y]", "test_c[y]", "test_cd")
    assert [is_promised(f"test_a.py::{test}", promised) for test in ids] == [
        True,
        False,
        True,
        False,
    ]


def test_a_change_adds_its_tests() -> None:
    table = {"titan/sim/*": ["tests/sim"], "docs/*.md": ["tests/test_pages.py"]}
    changed = ["titan/sim/report/page.py", "tests/data/test_x.py", "LICENSE"]
    assert touched_tests(changed, table) == ["tests/data/test_x.py", "tests/sim"]


def test_the_table_names_what_exists() -> None:
    for pattern, tests in read_table()["touched"].items():
        assert list(ROOT.glob(pattern)), pattern
        assert all((ROOT / test.partition("::")[0]).exists() for test in tests), tests


RED = "import os\ndef test_a(): os._exit(3)\ndef test_b(): assert 0\ndef test_c(): pass\n"


def test_a_test_whose_process_dies_is_red_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_red.py").write_text(RED)
    plugins = f"-p tests.support.costs -p tests.support.forks -c {os.devnull}".split()
    command = [sys.executable, "-m", "pytest", "--forks=2", *plugins, tmp_path]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    assert "the process of this test ended with 3" in said and "2 failed, 1 passed" in said


PLANTED = """
from titan.config.phases import Layout, Nothing  # missing-module-attribute
from titan.models.llama3.config import FLAVORS

first, second = FLAVORS["tiny"].dim, Layout.degrees, 1  # bad-unpacking
FLAVORS["tiny"].dim[0]  # bad-index
FLAVORS["tiny"].dim()  # not-callable
FLAVORS["tiny"].width  # missing-attribute
FLAVORS.get("tiny").dim  # missing-attribute
Layout(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, accumulation=1, dp=1)  # unexpected-keyword
Layout(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp="1", accumulation=1)  # bad-argument-type
Layout(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)  # missing-argument
del later  # unbound-name
later: int = None  # bad-assignment


def text(layout: Layout) -> str:
    return layout.pp  # bad-return
"""


def test_mistakes_of_types_are_found(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    command = ["scripts/types.sh", str(tmp_path / "planted.py")]
    settings = os.environ | {"TITAN_VENV": sys.prefix}
    said = subprocess.run(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True)
    assert re.findall(r"\[([\w-]+)\]\n", said.stdout) == re.findall("  # (.*)", PLANTED)
