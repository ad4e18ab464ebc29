"""tests/promises.toml: each promise has a state and a proof that exists, and the counts are right."""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from functools import cache

import pytest

from tests.support.jobs import ROOT
from tests.support.lanes import promised_tests, read_promises
from tests.support.pages import refusal
from titan.cli import main

TABLE = read_promises()
ROWS = TABLE["promise"]
COMMANDS = [row for row in ROWS if "command" in row]


def test_the_states_are_counted() -> None:
    assert [row["number"] for row in ROWS] == [*range(1, 79)]
    for part, rows in (("summary", ROWS[:63]), ("further", ROWS[63:])):
        assert Counter(row["state"] for row in rows) == TABLE[part]
    for row in ROWS:
        assert (row["state"] == "kept") != bool(row.get("missing")), row
        assert row["promise"] and (row.get("tests") or row["prints"]), row


@cache
def functions(file: str) -> set[str]:
    return {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}


def test_the_tests_are_there() -> None:
    """By their functions. Where all tests are collected, tests/support/lanes.py looks for the ids."""
    for test in promised_tests():
        file, name = test.partition("[")[0].split("::")
        assert name in functions(file), test


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: str(row["number"]))
def test_commands_are_valid(row: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert not refusal(row["command"], whole=True)
    if "cheap" in row:
        assert main(shlex.split(row["command"])[1:]) == 0
        assert row["prints"] in capsys.readouterr().out
