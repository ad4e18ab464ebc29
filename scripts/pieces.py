"""Run a lane of the tests in pieces, a folder at a time, so that it can be finished over several calls.

    python scripts/pieces.py full STATE.json --minutes 50                    # go on where the last call of this commit stopped
    python scripts/pieces.py full STATE.json --write tests/full.toml         # and keep the result in the tree, once all pieces have run

A piece runs as scripts/test.sh runs the whole. STATE.json holds, for each piece, what passed, failed and was skipped, its seconds and those
of the CPUs for all processes that it waited for. It belongs to one commit and one torch. The exit code is 0 if all pieces have run and passed, 75 if some are left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LEFT = 75


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()


def pieces() -> Iterator[tuple[str, list[str]]]:
    """Yield the folders with tests, and the files of each. The folder with the slowest tests comes first."""
    names = git("ls-files", "tests/**test_*.py", "tests/test_*.py", "titan/**test_*.py").split()
    folders: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        folder = str(Path(name).parent) if name.startswith("tests/") else "titan/contrib"
        folders.setdefault(folder, []).append(name)
    yield from sorted(folders.items(), key=lambda pair: (pair[0] != "tests/parity", pair[0]))


def run(files: list[str], *, lane: str, workers: int) -> dict[str, Any]:
    """Run the tests of some files. Return what happened."""
    options = ["-q", "--forks", str(workers)]
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        path = Path(folder, "junit.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--lane",
            lane,
            *options,
            f"--junitxml={path}",
        ]
        process = subprocess.Popen([*command, *files], cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        cases = ElementTree.parse(path).getroot().iter("testcase") if path.exists() else []
        found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
        for case in cases:
            name = f"{case.get('classname')}::{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                found["failed"].append(name)
            elif case.find("skipped") is not None:
                found["skipped"].append(name)
            else:
                found["passed"] += 1
    if code not in (0, 1, 5) or (code == 1 and not found["failed"]):  # 5: no test of this lane
        found["failed"].append(f"pytest ended with {code}")
    seconds = {"seconds": time.monotonic() - start, "cpu_s": used.ru_utime + used.ru_stime}
    return found | {name: round(value) for name, value in seconds.items()}


def summary(state: dict[str, Any]) -> dict[str, Any]:
    """Return the result of all pieces."""
    rows = [*state["pieces"].values()]
    return {
        "commit": state["commit"],
        "date": time.strftime("%Y-%m-%d"),
        "torch": state["torch"],
        "passed": sum(row["passed"] for row in rows),
        "failed": [name for row in rows for name in row["failed"]],
        "skipped": sum(len(row["skipped"]) for row in rows),
        "minutes": round(sum(row["seconds"] for row in rows) / 60, 1),
        "cpu_minutes": round(sum(row["cpu_s"] for row in rows) / 60, 1),
    }


def main() -> int:
    """Run the pieces that are left."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lane", choices=("default", "full"))
    parser.add_argument("state", type=Path)
    parser.add_argument("--only", nargs="+", metavar="FOLDER", help="these pieces only")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no piece after these")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="forget what the state holds")
    parser.add_argument("--write", type=Path, help="file for the result, once all have run")
    args = parser.parse_args()
    about = {"lane": args.lane, "commit": git("rev-parse", "--short", "HEAD")}
    about["torch"] = torch.__version__
    state: dict[str, Any] = {**about, "pieces": {}}
    if args.state.exists() and not args.again:
        state = json.loads(args.state.read_text())
        if other := {k: state[k] for k in about if state[k] != about[k]}:
            print(
                f"{args.state} is of {other}, and this is {about}: pass --again to start over"
            )
            return 2
    if git("status", "--porcelain", "--untracked-files=no"):
        print("the checkout has changes that no commit has: commit them first")
        return 2
    end, left = time.monotonic() + 60 * args.minutes, []
    for folder, files in pieces():
        if folder in state["pieces"] or (args.only and folder not in args.only):
            continue
        if time.monotonic() > end:
            left.append(folder)
            continue
        print(f"---- {folder}", flush=True)
        state["pieces"][folder] = run(files, lane=args.lane, workers=args.workers)
        args.state.write_text(json.dumps(state, indent=1) + "\n")
    for folder, row in sorted(state["pieces"].items(), key=lambda pair: -pair[1]["cpu_s"]):
        text = f"{row['passed']:5d} passed {len(row['failed']):3d} failed {len(row['skipped']):3d} skipped"
        print(f"{folder:44s} {text} {row['seconds']:5d} s, {row['cpu_s']:5d} CPU-s")
    found = summary(state)
    print(", ".join(f"{key} {value}" for key, value in found.items() if key != "failed"))
    for name in found["failed"]:
        print(f"FAILED {name}")
    if left:
        print(f"left: {', '.join(left)}; run the same command to go on")
        return LEFT
    if args.write and not args.only:
        lines = [f"{key} = {json.dumps(value)}" for key, value in found.items()]
        about_file = "# The last complete run of the full lane: scripts/pieces.py writes it."
        args.write.write_text("\n".join([about_file, *lines]) + "\n")
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
