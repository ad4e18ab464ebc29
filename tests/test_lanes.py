"""The table of lanes, and what a change adds."""

from __future__ import annotations

from pathlib import Path

from tests.support.lanes import lane_of, read_table, touched_tests

ROOT = Path(__file__).parents[1]


def test_the_longest_row_decides() -> None:
    lanes = {"tests/a": "full", "tests/a/test_b.py::test_c[x]": "default", "tests/q": "quick"}
    assert lane_of("tests/a/test_b.py::test_c[x]", lanes) == "default"
    assert lane_of("tests/a/test_b.py::test_c[y]", lanes) == "full"
    assert lane_of("tests/q.py::test_d", lanes) == "quick"
    assert lane_of("tests/other.py::test_e", lanes) == "default"


def test_a_change_adds_its_tests() -> None:
    table = {"titan/sim/*": ["tests/sim"], "docs/*.md": ["tests/test_pages.py"]}
    changed = ["titan/sim/report/page.py", "tests/data/test_x.py", "LICENSE"]
    assert touched_tests(changed, table) == ["tests/data/test_x.py", "tests/sim"]


def test_the_table_names_what_exists() -> None:
    for pattern, tests in read_table()["touched"].items():
        assert list(ROOT.glob(pattern)), pattern
        assert all((ROOT / test.partition("::")[0]).exists() for test in tests), tests
