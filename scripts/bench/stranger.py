"""Time a stranger's path: from a clone to a step, to text, to text of yours, to a Hugging Face model, to another package's family.

    python scripts/bench/stranger.py [--folder FOLDER] [--output table.md]

It runs the blocks of the pages as they are written, in a fresh clone and a fresh environment, so a step that is missing from
a page stops it. Run it on an idle machine: pip fetches torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.support.pages import Block, blocks, commands  # noqa: E402

# A line of a command's output, and what has happened when it appears.
MARKS = {"step   1/480": "first step", "step 480/480  loss": "trained model"}


def parts() -> list[tuple[str, list[str]]]:
    """Return what a stranger wants, each with the commands of its page."""
    tour, own_text = blocks("README.md", "bash")[:2]
    return [
        ("The tour", list(commands(tour))[:1]),
        ("Own text", ["mkdir my_text; cp docs/*.md my_text", *commands(own_text)]),
        ("First run", _of("docs/index.md", "titan init", "--nproc 2")),
        ("Own Hugging Face model", _of("docs/huggingface.md", "pip install", "AutoTokenizer")),
        ("Own family of models", _of("docs/architecture.md", "cp -r examples")),
    ]


def _of(page: str, first: str, last: str = "") -> list[str]:
    """Return a page's commands from the block that begins with `first` to the one that holds `last`, or of that block alone."""
    found = blocks(page, "bash")
    start = next(i for i, block in enumerate(found) if block.text.startswith(first))
    end = next((i for i, block in enumerate(found) if last and last in block.text), start)
    chosen: list[Block] = found[start : end + 1]
    # There may be no internet; the page says what to do then.
    return [line for block in chosen for line in commands(block) if "hf download" not in line]


def run(command: str, folder: Path, began: float) -> tuple[float, list[tuple[str, float]]]:
    """Run a command in the clone, show what it prints, and return its seconds and when a mark appeared."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    environment["PATH"] = f"{folder / '.venv/bin'}:{os.environ['PATH']}"
    print(f"\n$ {command}", flush=True)
    start, marks = time.monotonic(), []
    process = subprocess.Popen(
        ["bash", "-eo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
        marks += [(MARKS[mark], time.monotonic() - began) for mark in MARKS if mark in line]
    if process.wait():
        sys.exit(f"exit code {process.returncode}: {command}")
    return time.monotonic() - start, marks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="where to clone to; a temporary folder without it"
    )
    parser.add_argument("--output", type=Path, help="also write the table to a file")
    options = parser.parse_args()
    parent = options.folder or Path(tempfile.mkdtemp(prefix="stranger-"))
    parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", ROOT, parent / "titan"], check=True)
    rows = [("Clone", "git clone", time.monotonic() - began, time.monotonic() - began)]
    for part, lines in parts():
        for command in lines:
            seconds, marks = run(command, parent / "titan", began)
            rows += [(part, f"... {mark}", float("nan"), at) for mark, at in marks]
            rows.append((part, command.split("\n")[0], seconds, time.monotonic() - began))
    table = ["| part | command | seconds | since the clone began |", "|---|---|--:|--:|"]
    for part, command, seconds, total in rows:
        took = "" if seconds != seconds else f"{seconds:.1f}"
        table.append(f"| {part} | `{command}` | {took} | {total:.0f} |")
    text = "\n".join(table)
    print(f"\n{text}")
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
