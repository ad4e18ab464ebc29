"""Parts that all pieces use: results that are kept over several calls, and tables in pages."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pieces import LEFT, ROOT, Result, git, run_all

from titan.config.toml import tomllib

__all__ = ["LEFT", "ROOT", "Result", "git"]

TITAN = [sys.executable, "-m", "titan.cli"]
TABLE = tomllib.loads((ROOT / "scripts/drill.toml").read_text(encoding="utf-8"))
# No fault depends on these.
HARMLESS = ("docs/", "scripts/drill.", "scripts/drills/faults", "CHANGELOG.md", "README.md")
HARMLESS += ("titan/contrib/elastic/README.md",)


def add_options(parser: argparse.ArgumentParser, only: Iterable[str]) -> None:
    """Add the options of a piece that goes on where its last call stopped."""
    parser.add_argument("--only", nargs="+", choices=[*only], metavar="KIND")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after these")
    parser.add_argument("--again", action="store_true", help="repeat what was not right")
    parser.add_argument("--write", action="store_true", help="write tables, once all have run")


@cache
def counts_now(commit: str) -> bool:
    """Return whether a result of a commit is one of the present tree, too."""
    try:
        changed = git("diff", "--name-only", commit, "--").splitlines()
    except subprocess.CalledProcessError:  # a commit of another clone
        return False
    return all(name.startswith(HARMLESS) for name in changed)


def run_kept(
    file: Path, runs: Mapping[str, Callable[[], Result]], options: argparse.Namespace
) -> dict[str, Result]:
    """Run what a file has no result of, and print each. Returns those that have run, by name.

    Args:
        file: keeps the results, each with its commit. One of another commit counts if no fault depends on what has changed.
        runs: what to run, by name. A result has "wrong", the text of what was not right.
        options: those of `add_options`.
    """
    commit = git("rev-parse", "--short", "HEAD")

    def tell(name: str) -> Result:
        found = runs[name]()
        print(f"{name}: {found['wrong'] or 'right'}", flush=True)
        return found | {"commit": commit}

    return run_all(
        file,
        {name: partial(tell, name) for name in runs},
        is_current=lambda _, row: (
            counts_now(row["commit"]) and not (options.again and row["wrong"])
        ),
        minutes=options.minutes,
    )


def exit_code(found: Mapping[str, Result], names: Collection[str]) -> int:
    """Print how far it is, and return the exit code: 75 if some are left, 1 if one is not right."""
    done = [found[name]["wrong"] for name in names if name in found]
    wrong = sum(map(bool, done))
    print(f"{len(done)} of {len(names)} have run, {wrong} not right")
    return LEFT if len(done) < len(names) else min(wrong, 1)


def table(head: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return the lines of a table, with its first two as they are given."""
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    return [*head.splitlines(), *(f"| {' | '.join(row)} |" for row in cells)]


def start(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command that writes to the end of a file."""
    with log.open("a") as file:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True, **options
        )


def write(page: Path, what: str, lines: Iterable[str]) -> None:
    """Replace the lines between the markers of a page."""
    begin, end = f"<!-- {what} -->", f"<!-- end of {what} -->"
    new = "\n".join([begin, *lines, end])
    text = re.sub(f"{begin}.*{end}", lambda _: new, page.read_text("utf-8"), flags=re.S)
    page.write_text(text, encoding="utf-8")
