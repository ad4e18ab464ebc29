"""Cause the faults of scripts/drill.toml, in pieces, and write what they cost into docs/cluster.md.

    python scripts/drill.py STATE.json --minutes 30                  # go on where the last call of this commit stopped
    python scripts/drill.py STATE.json --write docs/cluster.md       # and write the table, once all have run

A fault is one test or several (pytest -m "" with the lane full, so slow ones run, too). STATE.json holds the verdict of each. The exit code is 0 if all
have run and passed, 75 if some are left.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from pieces import LEFT, ROOT, git

from titan.config.toml import tomllib

BEGIN, END = "<!-- drill -->", "<!-- end of drill -->"


def faults() -> list[dict[str, Any]]:
    """Return the faults: group, name, what each may cost, its tests."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [
        {"group": group["name"], "name": name, "lost": lost, "tests": tests}
        for group in table["group"]
        for name, lost, tests in group["faults"]
    ]


def verdict(tests: list[str]) -> str:
    """Return "right", or the last line that pytest printed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--lane",
        "full",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    line = (done.stdout.strip().splitlines() or ["no output"])[-1]
    # A test that was skipped has caused nothing.
    return "right" if done.returncode == 0 and "skipped" not in line else line


def table(rows: list[dict[str, Any]], verdicts: dict[str, str]) -> str:
    """Return the table of docs/cluster.md: a row for each group of faults."""
    lines = ["| faults | number | right | what they may cost |", "|---|--:|--:|---|"]
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        right = sum(verdicts[row["name"]] == "right" for row in mine)
        costs = "; ".join(dict.fromkeys(row["lost"] for row in mine))
        lines.append(f"| {group} | {len(mine)} | {right} | {costs} |")
    return "\n".join(lines)


def main() -> int:
    """Cause the faults that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no fault after these")
    parser.add_argument("--again", action="store_true", help="forget what the state holds")
    parser.add_argument("--write", type=Path, help="page for the table, once all have run")
    args = parser.parse_args()
    commit = git("rev-parse", "--short", "HEAD")
    state: dict[str, Any] = {"commit": commit, "verdicts": {}}
    if args.state.exists() and not args.again:
        state = json.loads(args.state.read_text())
        if state["commit"] != commit:
            print(
                f"{args.state} is of commit {state['commit']}, and this is {commit}: pass --again to start over"
            )
            return 2
    rows, verdicts, end = faults(), state["verdicts"], time.monotonic() + 60 * args.minutes
    for row in rows:
        if row["name"] in verdicts or time.monotonic() > end:
            continue
        begin = time.monotonic()
        verdicts[row["name"]] = found = verdict(row["tests"])
        print(
            f"{row['group']}: {row['name']}: {found} ({time.monotonic() - begin:.0f} s)", flush=True
        )
        args.state.write_text(json.dumps(state, indent=1) + "\n")
    left = [row["name"] for row in rows if row["name"] not in verdicts]
    wrong = [name for name, found in verdicts.items() if found != "right"]
    print(
        f"{len(verdicts)} of {len(rows)} faults, {len(wrong)} not right{': ' * bool(wrong)}{', '.join(wrong)}"
    )
    if left:
        return LEFT
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        about = (
            f"{len(rows)} faults on {time.strftime('%-d %B %Y')}, {len(rows) - len(wrong)} right:"
        )
        new = f"{BEGIN}\n{about}\n\n{table(rows, verdicts)}\n{END}"
        args.write.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: new, text, flags=re.S))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
