"""Cause the faults of scripts/drill.toml, in pieces, and write what they cost into docs/cluster.md and docs/log.md.

    python scripts/drill.py faults STATE.json --minutes 30    # go on where the last call stopped
    python scripts/drill.py faults STATE.json --write         # and write the tables, once all have run
    python scripts/drill.py faults STATE.json --check         # only look for lines that titan does not say any more

A fault is one test or several, slow ones too. STATE.json holds the result of each, with the commit that it is of. The exit code is 0
if all faults have run and passed, 75 if some are left, and 2 if a line of the table is stale.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from .shared import LEFT, ROOT, TABLE, Result, exit_code, git, run_kept, table, write
from .shared import add_options as add_shared

SUMMARY = "| faults | number | at worst |\n|---|--:|---|"
EACH = """\
| group | fault | what it may cost | the line that a user sees | found |
|---|---|---|---|---|"""
# What the command ends with, after the words of a line.
EXIT = re.compile(r"(?:; )?exit (\d+)$")


class Fault(NamedTuple):
    """A row of drill.toml.

    Attributes:
        group: what it belongs to.
        name: its name.
        cost: what it may cost.
        tests: what causes it.
        line: what a user sees.
    """

    group: str
    name: str
    cost: str
    tests: list[str]
    line: str


FAULTS = [Fault(group["name"], *row) for group in TABLE["group"] for row in group["faults"]]
GROUPS = dict.fromkeys(fault.group for fault in FAULTS)


def literal(text: str) -> str:
    """Return source text with adjacent string literals joined, and "…" for the values of f-strings."""
    text = re.sub(r"[\"']\s*\n\s*[fr]?[\"']", "", text).replace("\\", "")
    return re.sub(r"\{[^{}]*\}|\$\w+", "…", text)


@cache
def source() -> str:
    """Return the text of the product."""
    names = git("ls-files", "titan/**.py", "models/**.py", "scripts/slurm/*").split()
    return "\n".join(literal((ROOT / name).read_text(encoding="utf-8")) for name in names)


def stale(fault: Fault) -> list[str]:
    """Return what is wrong with the line: words that stand neither in titan nor in the tests, and a code that no test has."""
    files = {ROOT / test.partition("::")[0] for test in fault.tests}
    tests = "\n".join(literal(file.read_text(encoding="utf-8")) for file in files)
    found, code = [], EXIT.search(fault.line)
    if code and not re.search(rf"\b{code[1]}\b", tests):
        found.append(f"{fault.name}: no test has the exit code {code[1]}")
    # The texts between names, numbers and brackets stand in the source as they are.
    words = EXIT.sub("", fault.line).replace("\\", "")
    parts = [part.strip() for part in re.split("…|[()]|; (?=NO )", words)]
    text = source() + tests
    return found + [f"{fault.name}: titan does not say {x!r}" for x in parts if x not in text]


def cause(fault: Fault) -> Result:
    """Run the tests. What is wrong is the last line that pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--lane", "full", "-m", "not gpu", *fault.tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = (done.stdout.strip().splitlines() or ["no output"])[-1]
    # A test that was skipped has caused nothing.
    is_right = done.returncode == 0 and "skipped" not in line
    return {"wrong": "" if is_right else line}


def write_tables(found: Mapping[str, Result]) -> None:
    """Write a row for each group of faults into docs/cluster.md, and one for each fault into docs/log.md."""
    groups = [(row["name"], len(row["faults"]), row["worst"]) for row in TABLE["group"]]
    right = sum(not found[fault.name]["wrong"] for fault in FAULTS)
    said = f"{len(FAULTS)} faults on {time.strftime('%-d %B %Y')}, {right} right"
    each = "[Each fault, and the line that a user sees](log.md#the-drill-of-faults)."
    lines = table(SUMMARY, groups)
    write(ROOT / "docs/cluster.md", "drill", [f"{said}. {each}", "", *lines])
    rows = [(*fault[:3], fault.line, found[fault.name]["wrong"] or "right") for fault in FAULTS]
    commits = ", ".join(sorted({found[fault.name]["commit"] for fault in FAULTS}))
    lines = [f"{said} (commit {commits}):", "", *table(EACH, rows)]
    write(ROOT / "docs/log.md", "drill", lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the piece's options."""
    parser.add_argument("state", type=Path)
    parser.add_argument("--check", action="store_true", help="check the lines, and run nothing")
    add_shared(parser, GROUPS)


def run(options: argparse.Namespace) -> int:
    """Cause the faults that are left."""
    if lines := [line for fault in FAULTS for line in stale(fault)]:
        print("\n".join(lines))
        return 2
    if options.check:
        return 0
    wanted = [fault for fault in FAULTS if fault.group in (options.only or GROUPS)]
    runs = {fault.name: partial(cause, fault) for fault in wanted}
    found = run_kept(options.state, runs, options)
    code = exit_code(found, [fault.name for fault in FAULTS])
    if options.write and code != LEFT:
        write_tables(found)
    return code
