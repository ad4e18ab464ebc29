"""Cause the faults of scripts/drill.toml, in pieces, and write what they cost into docs/cluster.md and docs/log.md.

    python scripts/drill.py STATE.json --minutes 30    # go on where the last call stopped
    python scripts/drill.py STATE.json --write         # and write the tables, once all have run
    python scripts/drill.py STATE.json --check         # only look for lines that titan does not say any more

A fault is one test or several, slow ones too. STATE.json holds the verdict of each, with the commit that it is of. A verdict of
another commit counts if the two differ only in files that no fault depends on. The exit code is 0 if all faults have run and
passed, 75 if some are left, and 2 if a line of the table is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from pieces import LEFT, ROOT, git

from titan.config.toml import tomllib

BEGIN, END = "<!-- drill -->", "<!-- end of drill -->"
SUMMARY, ALL = ROOT / "docs/cluster.md", ROOT / "docs/log.md"
# No fault depends on these.
HARMLESS = ("docs/", "scripts/drill.", "CHANGELOG.md")
# What the command ends with, after the words of a line.
EXIT = re.compile(r"(?:; )?exit (\d+)$")


def faults() -> list[dict[str, Any]]:
    """Return the faults: group, name, what each may cost, its tests, the line that a user sees."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [
        {"group": group["name"], "name": name, "lost": lost, "tests": tests, "line": line}
        for group in table["group"]
        for name, lost, tests, line in group["faults"]
    ]


# ---- lines -----------------------------------------------------------------------------------------


def literal(text: str) -> str:
    """Return source text with adjacent string literals joined, and "…" for the values of f-strings."""
    text = re.sub(r"[\"']\s*\n\s*[fr]?[\"']", "", text).replace("\\", "")
    return re.sub(r"\{[^{}]*\}|\$\w+", "…", text)


@cache
def source() -> str:
    """Return the text of the product."""
    names = git("ls-files", "titan/**.py", "models/**.py", "scripts/slurm/*").split()
    return "\n".join(literal((ROOT / name).read_text(encoding="utf-8")) for name in names)


def stale_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the lines: words that stand neither in titan nor in the fault's tests, and codes that no test has."""
    found = []
    for row in rows:
        files = {ROOT / test.partition("::")[0] for test in row["tests"]}
        tests = "\n".join(literal(file.read_text(encoding="utf-8")) for file in files)
        code = EXIT.search(row["line"])
        if code and not re.search(rf"\b{code[1]}\b", tests):
            found.append(f"{row['name']}: no test has the exit code {code[1]}")
        # The texts between names, numbers and brackets stand in the source as they are.
        words = EXIT.sub("", row["line"]).replace("\\", "")
        parts = [part.strip() for part in re.split("…|[()]|; (?=NO )", words)]
        text = source() + tests
        found += [f"{row['name']}: titan does not say {x!r}" for x in parts if x not in text]
    return found


# ---- verdicts --------------------------------------------------------------------------------------


def verdict(tests: list[str]) -> str:
    """Return "right", or the last line that pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--lane", "full", "-m", "not gpu"]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    line = (done.stdout.strip().splitlines() or ["no output"])[-1]
    # A test that was skipped has caused nothing.
    return "right" if done.returncode == 0 and "skipped" not in line else line


@cache
def counts_now(commit: str) -> bool:
    """Return whether a verdict of a commit is one of the present tree, too."""
    try:
        changed = git("diff", "--name-only", commit, "--").splitlines()
    except subprocess.CalledProcessError:  # a commit of another clone
        return False
    return all(name.startswith(HARMLESS) for name in changed)


def read_state(path: Path) -> dict[str, dict[str, str]]:
    """Return the verdicts that count: name of the fault -> verdict, commit."""
    state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "commit" in state:  # as titan wrote it at first
        of = {"commit": state["commit"]}
        state = {name: {"verdict": found, **of} for name, found in state["verdicts"].items()}
    return {name: found for name, found in state.items() if counts_now(found["commit"])}


# ---- tables ----------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]], verdicts: dict[str, dict[str, str]]) -> list[str]:
    """Return the table of docs/cluster.md: a row for each group of faults."""
    lines = ["| faults | number | right | what they may cost |", "|---|--:|--:|---|"]
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        right = sum(verdicts[row["name"]]["verdict"] == "right" for row in mine)
        costs = "; ".join(dict.fromkeys(row["lost"].partition(":")[0] for row in mine))
        lines.append(f"| {group} | {len(mine)} | {right} | {costs} |")
    return lines


def everything(rows: list[dict[str, Any]], verdicts: dict[str, dict[str, str]]) -> list[str]:
    """Return the table of docs/log.md: a row for each fault."""
    lines = [
        "| group | fault | what it may cost | the line that a user sees | found |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        said = row["line"].replace("|", "\\|")
        found = verdicts[row["name"]]["verdict"]
        lines.append(f"| {row['group']} | {row['name']} | {row['lost']} | {said} | {found} |")
    return lines


def write(page: Path, lines: list[str]) -> None:
    """Replace the lines between the markers of a page."""
    text = page.read_text(encoding="utf-8")
    new = "\n".join([BEGIN, *lines, END])
    page.write_text(
        re.sub(f"{BEGIN}.*{END}", lambda _: new, text, flags=re.S), encoding="utf-8"
    )


def main() -> int:
    """Cause the faults that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path)
    parser.add_argument("--groups", nargs="+", metavar="NAME", help="these groups only")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no fault after these")
    parser.add_argument(
        "--again", action="store_true", help="run all that are not right once more"
    )
    parser.add_argument("--check", action="store_true", help="check the lines, and run nothing")
    parser.add_argument(
        "--write", action="store_true", help="write the tables, once all have run"
    )
    args = parser.parse_args()
    rows, end = faults(), time.monotonic() + 60 * args.minutes
    if stale := stale_lines(rows):
        print("\n".join(stale))
        return 2
    if args.check:
        return 0
    commit, verdicts = git("rev-parse", "--short", "HEAD"), read_state(args.state)
    if args.again:
        verdicts = {
            name: found for name, found in verdicts.items() if found["verdict"] == "right"
        }
    for row in rows:
        if row["name"] in verdicts or time.monotonic() > end:
            continue
        if args.groups and row["group"] not in args.groups:
            continue
        begin = time.monotonic()
        found = verdict(row["tests"])
        verdicts[row["name"]] = {"verdict": found, "commit": commit}
        took_s = time.monotonic() - begin
        print(f"{row['group']}: {row['name']}: {found} ({took_s:.0f} s)", flush=True)
        args.state.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    done = [row for row in rows if row["name"] in verdicts]
    wrong = [row["name"] for row in done if verdicts[row["name"]]["verdict"] != "right"]
    print(
        f"{len(done)} of {len(rows)} faults, {len(wrong)} not right: {', '.join(wrong) or '-'}"
    )
    if len(done) < len(rows):
        return LEFT
    if args.write:
        right = f"{len(rows)} faults on {time.strftime('%-d %B %Y')}, {len(rows) - len(wrong)} right"
        each = "[Each fault, and the line that a user sees](log.md#the-drill-of-faults)."
        write(SUMMARY, [f"{right}. {each}", "", *summary(rows, verdicts)])
        commits = ", ".join(sorted({verdicts[row["name"]]["commit"] for row in rows}))
        write(ALL, [f"{right} (commit {commits}):", "", *everything(rows, verdicts)])
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
