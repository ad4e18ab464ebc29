"""Run a lane of the tests in pieces, a folder at a time, so that it can be finished over several calls.

    python scripts/pieces.py full STATE.json --minutes 50                    # go on where the last call of this commit stopped
    python scripts/pieces.py full STATE.json --write tests/full.toml         # and keep the result in the tree, once all pieces have run

A piece runs as scripts/test.sh runs the whole. STATE.json holds, for each piece, what passed, failed and was skipped, its seconds and those
of the CPUs for all processes that it waited for. A result counts for one commit and one torch. The exit code is 0 if all pieces have run and
passed, 75 if some are left. `run_all` also keeps the results of scripts/drill.py and of `scripts/planted.py promises`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LEFT = 75
Result = dict[str, Any]


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()


def run_all(
    file: Path,
    runs: Mapping[str, Callable[[], Result]],
    *,
    is_current: Callable[[str, Result], bool],
    minutes: float,
) -> dict[str, Result]:
    """Run what a file has no current result of, and write each result to it. Returns the current results by name.

    Args:
        file: the results of earlier calls.
        runs: what to run, by name.
        is_current: whether a result of an earlier call counts.
        minutes: nothing begins after these.
    """
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {name: row for name, row in kept.items() if is_current(name, row)}
    end = time.monotonic() + 60 * minutes
    for name, run in runs.items():
        start = time.monotonic()
        if name in found or start > end:
            continue
        result = run()
        found[name] = result | {"seconds": round(time.monotonic() - start)}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def pieces() -> Iterator[tuple[str, list[str]]]:
    """Yield the folders with tests, and the files of each. The folder with the slowest tests comes first."""
    names = git("ls-files", "tests/**test_*.py", "tests/test_*.py", "titan/**test_*.py").split()
    folders: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        folder = str(Path(name).parent) if name.startswith("tests/") else "titan/contrib"
        folders.setdefault(folder, []).append(name)
    yield from sorted(folders.items(), key=lambda pair: (pair[0] != "tests/parity", pair[0]))


def run(folder: str, files: list[str], *, about: Result, workers: int) -> Result:
    """Run the tests of a folder. Return what happened."""
    print(f"---- {folder}", flush=True)
    with TemporaryDirectory() as name:
        path = Path(name, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--lane", about["lane"]]
        command += ["--forks", str(workers), f"--junitxml={path}"]
        process = subprocess.Popen([*command, *files], cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        cases = ElementTree.parse(path).getroot().iter("testcase") if path.exists() else []
        found: Result = {"of": about, "passed": 0, "failed": [], "skipped": []}
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
    return found | {"cpu_s": round(used.ru_utime + used.ru_stime)}


def summary(about: Result, rows: Collection[Result]) -> Result:
    """Return the result of all pieces."""
    return {
        "commit": about["commit"],
        "date": time.strftime("%Y-%m-%d"),
        "torch": about["torch"],
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
    parser.add_argument("--write", type=Path, help="file for the result, once all have run")
    args = parser.parse_args()
    about = {"lane": args.lane, "commit": git("rev-parse", "--short", "HEAD")}
    about["torch"] = torch.__version__
    if git("status", "--porcelain", "--untracked-files=no"):
        print("the checkout has changes that no commit has: commit them first")
        return 2
    every = dict(pieces())
    runs = {
        folder: partial(run, folder, files, about=about, workers=args.workers)
        for folder, files in every.items()
        if folder in (args.only or every)
    }
    state = run_all(
        args.state,
        runs,
        is_current=lambda _, row: row["of"] == about,
        minutes=args.minutes,
    )
    left = [folder for folder in runs if folder not in state]
    for folder, row in sorted(state.items(), key=lambda pair: -pair[1]["cpu_s"]):
        text = f"{row['passed']:5d} passed {len(row['failed']):3d} failed {len(row['skipped']):3d} skipped"
        print(f"{folder:44s} {text} {row['seconds']:5d} s, {row['cpu_s']:5d} CPU-s")
    found = summary(about, state.values())
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
