"""Draws docs/pictures/source_loss.png: a run with a bad row, and the same run without it (docs/data.md)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from titan.cli import main

ROOT = Path(__file__).parent.parent
JOB = """
[model]
name = "llama3"
flavor = "tiny"
[tokenizer]
name = "bytes"
[training]
seq_len = 256
local_batch_size = 4
steps = 120
[optimizer]
lr = 3e-3
[metrics]
log_freq = 1
[fault_tolerance]
spike_window = 30
[checkpoint]
enable = true
interval = 40
[[data.sources]]
type = "jsonl"
path = "prose.jsonl"
weight = 2
[[data.sources]]
type = "jsonl"
path = "code.jsonl"
"""


def write_rows(folder: Path) -> None:
    """Write the two sources: paragraphs of the pages, and titan's own code with one row of another kind."""
    drawn = random.Random(3)
    pages = [file.read_text("utf-8") for file in sorted(ROOT.glob("docs/*.md"))]
    files = [file.read_text("utf-8") for file in sorted(ROOT.glob("titan/data/*.py"))]
    code = [part for text in files for part in text.split("\n\n\n")]
    code[61] = "".join(chr(drawn.randrange(0x400, 0x500)) for _ in range(400))
    sources = {"prose": [part for text in pages for part in text.split("\n\n")], "code": code}
    for name, rows in sources.items():
        lines = [json.dumps({"text": row}) + "\n" for row in rows if row]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def draw(folder: Path) -> None:
    """Train both runs in a folder, and draw them."""
    write_rows(folder)
    job = folder / "job.toml"
    job.write_text(JOB.replace('path = "', f'path = "{folder}/'))
    runs = [str(folder / name) for name in ("outputs", "skipped")]
    main(["train", str(job), f"--job.dump_folder={runs[0]}"])
    main(["train", str(job), f"--job.dump_folder={runs[1]}", "--data.skip=code:61"])
    main(["plot", *runs, f"--output={ROOT}/docs/pictures/source_loss.png"])


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
