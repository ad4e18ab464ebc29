"""tests/promises.toml: each promise has a state and a proof that exists, and the counts are right."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

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
        assert row["state"] == "not" or ("mutant" in row) != ("no_mutant" in row), row
        assert (row["state"] == "kept") != bool(row.get("missing")), row
        assert row["promise"] and (row.get("tests") or row["prints"]), row


def test_mutants_are_where_they_say() -> None:
    for row in ROWS:
        if mutant := row.get("mutant"):
            text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
            assert text.count(mutant["before"]) == 1, row


@cache
def functions(file: str) -> set[str]:
    return {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}


def test_the_tests_are_there() -> None:
    """By their functions. Where all tests are collected, tests/support/lanes.py looks for the ids."""
    for test in promised_tests():
        file, name = test.partition("[")[0].split("::")
        assert name in functions(file), test


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: str(row["number"]))
def test_commands(
    row: dict[str, str], capfd: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """They are valid. Cheap ones print what they should, and with --promises all do."""
    assert not refusal(row["command"], whole=True)
    if "cheap" in row:
        assert main(shlex.split(row["command"])[1:]) == 0
    elif pytestconfig.getoption("--promises"):
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": tools}
        subprocess.run(row["command"], shell=True, cwd=ROOT, env=environment, check=True)
    else:
        return
    assert row["prints"] in capfd.readouterr().out
