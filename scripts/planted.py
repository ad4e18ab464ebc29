"""Plant a fault in a copy of the project, one in each subsystem, and see that the default lane finds it.

    python scripts/planted.py             all of them; prints a table
    python scripts/planted.py clipping    those whose names hold a word
    python scripts/planted.py promises STATE.json [--minutes N] [ROW ...]
                                          the mutants of tests/promises.toml that STATE.json does not know: a test of the row must be red with
                                          the mutant, and green without it

Each fault replaces one text of one file by another. A fault whose text is no longer there is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from scripts.pieces import LEFT, run_all  # noqa: E402
from tests.support.lanes import cost_of, read_costs, read_promises  # noqa: E402
from titan.config.toml import read_toml  # noqa: E402

Fault = dict[str, Any]
"""Text of a file (`before`) and what replaces it (`after`): a row of planted.toml, or a mutant of tests/promises.toml."""


def copy_with(fault: Fault, folder: Path) -> None:
    """Copy the tracked files to `folder`, with the fault. Raises ValueError for a text that is not there once."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, folder / name)
    file = folder / fault["file"]
    text = file.read_text(encoding="utf-8")
    times = text.count(fault["before"])
    if times != 1:
        raise ValueError(f"{fault['file']} holds this text {times} times: {fault['before']}")
    file.write_text(text.replace(fault["before"], fault["after"]), encoding="utf-8")


def environment_of(folder: Path) -> dict[str, str]:
    """Return the variables with which a copy's modules are found first: an editable install comes last on the path."""
    return {**os.environ, "PYTHONPATH": str(folder), "TITAN_PARITY_STEPS": "3"}


def lane() -> list[str]:
    """Return the ids of the default lane's tests, as the commit draws them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    return [line for line in run.stdout.splitlines() if re.match(r"t\S*\.py::", line)]


def failures_with(fault: Fault, tests: list[str]) -> list[str]:
    """Return those of some tests that fail with the fault, no more than the first ten. Parity rows train three steps."""
    with tempfile.TemporaryDirectory() as name:
        copy_with(fault, Path(name))
        environment = environment_of(Path(name))
        pytest = ["-m", "pytest", "-q", "--forks", "2", "--maxfail", "10"]
        command = [sys.executable, *pytest, "--lane", "full", "-p", "no:cacheprovider"]
        command += [test for test in tests if test.startswith(tuple(fault["tests"]))]
        run = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1, 2):
        raise RuntimeError(
            f"{fault['name']}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}"
        )
    return re.findall(
        r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", run.stdout, re.MULTILINE
    )


# ---- the mutants of tests/promises.toml ------------------------------------------------------------

LIMIT_S = 900  # of a function of tests
FOUND = "red, and green without"
AT_ONCE = 10  # proofs that run without their mutants
MARKS = ("not gpu and not slow", "slow and not gpu")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def run_in(
    folder: Path, command: list[str], *, limit_s: float | None
) -> subprocess.CompletedProcess[str]:
    """Run a program in a checkout or its copy."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def judge_test(test: str, marks: str, folder: Path) -> tuple[str, str]:
    """Run a function of tests, or a row of one, until one fails.

    Returns:
        "red" and the test that failed; "green"; "none" if nothing ran; or "error" and what pytest said.
    """
    try:
        run = run_in(folder, [*PYTEST, "-x", "-m", marks, test], limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "error", f"no end within {LIMIT_S} s"
    said = run.stdout
    failed = re.search(r"^FAILED (t.*?\.py::.*?)(?: - .*)?$", said, re.MULTILINE)
    # A test that waits for ever shows a fault of the mutant, and not which.
    if run.returncode == 1 and failed and "Failed: Timeout" not in said:
        return "red", failed[1]
    if run.returncode in (0, 5):
        return ("green" if " passed" in said else "none"), ""
    return "error", said[-1000:]


def judge(row: dict[str, Any], costs: dict[str, float], folder: Path) -> dict[str, Any]:
    """Look for a test of a promise that its mutant turns red. Cheap ones come first.

    The copy in `folder` is made again for each mutant. Files that did not change keep their times, and so their compiled code.
    """
    tests = sorted(row["tests"], key=lambda test: cost_of(test, costs))
    found: dict[str, Any] = {"about": [row["mutant"], row["tests"]], "by": "", "said": []}
    copy_with(row["mutant"], folder)
    for marks, test in product(MARKS, tests):
        result, text = judge_test(test, marks, folder)
        if result == "red":
            print(f"row {row['number']}: red {text}", flush=True)
            return found | {"result": "red", "by": text}
        if result != "none":
            found["said"].append(f"{test}: {result} {text}")
    errors = any(": error" in line for line in found["said"])
    return found | {"result": "error" if errors else "green"}


def without_mutants(rows: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Run what mutants have turned red as it is, at once. What does not pass proves nothing: its row becomes an error."""
    found = [state[f"{row['number']}"] for row in rows]
    command = [*PYTEST, "-rp", "-m", "not gpu", *(one["by"] for one in found)]
    said = run_in(PROJECT, command, limit_s=None).stdout
    passed = set(re.findall(r"^PASSED (t.*)$", said, re.MULTILINE))
    for one in found:
        one["result"] = FOUND if one["by"] in passed else "error"


def judge_promises(words: list[str]) -> int:
    """Judge the mutants that the state does not know. Return 0 if each is red, 75 if some rows are left."""
    parser = argparse.ArgumentParser(prog="planted.py promises")
    parser.add_argument("state", type=Path)
    parser.add_argument("rows", type=int, nargs="*", metavar="ROW")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no row after these")
    args = parser.parse_intermixed_args(words)
    rows = {str(row["number"]): row for row in read_promises()["promise"] if "mutant" in row}
    about = {key: [row["mutant"], row["tests"]] for key, row in rows.items()}
    if args.rows:
        rows = {f"{number}": rows[f"{number}"] for number in args.rows}
    costs = read_costs()
    with tempfile.TemporaryDirectory() as copy:
        state = run_all(
            args.state,
            {key: partial(judge, row, costs, Path(copy)) for key, row in rows.items()},
            is_current=lambda key, row: row["about"] == about.get(key),
            minutes=args.minutes,
        )
    left = [key for key in rows if key not in state]
    new = [row for key, row in rows.items() if state.get(key, {}).get("result") == "red"]
    for first in range(0, len(new), AT_ONCE):
        without_mutants(new[first : first + AT_ONCE], state)
        args.state.write_text(json.dumps(state, indent=1) + "\n")
    others = {k: state[k] for k in rows if k not in left and state[k]["result"] != FOUND}
    for key, found in others.items():
        print(f"row {key}: {found['result']}", *found["said"], sep="\n    ")
    print(
        f"{len(rows) - len(left) - len(others)} mutants are found, {len(others)} not; left: {left}"
    )
    return LEFT if left else len(others)


def main(words: list[str]) -> int:
    """Print a row for each fault of planted.toml. Return how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="faults whose names hold a word; default: all")
    words = parser.parse_args(words).words
    missed, tests = 0, lane()
    print("| planted in | fault | found by |\n|---|---|---|", flush=True)
    for fault in read_toml(Path(__file__).with_suffix(".toml"))[0]["fault"]:
        if words and not any(word in fault["name"] for word in words):
            continue
        failures = failures_with(fault, tests)
        missed += not failures
        found = "**nothing**"
        if failures:
            more = "+" if len(failures) >= 10 else ""
            found = f"{len(failures)}{more}, such as `{failures[0]}`"
        print(f"| {fault['name']} | {fault['what']} | {found} |", flush=True)
    return missed


if __name__ == "__main__":
    if sys.argv[1:2] == ["promises"]:
        sys.exit(judge_promises(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
