"""Draw the two shipped tasks from the docstrings of Python's standard library: `python scripts/draw_tasks.py [FOLDER]`.

    stdlib_choice    the beginning of a sentence; which of four ends is its own? The others end sentences of about the same length
    stdlib_cloze     a passage without its last word, which also stands earlier in the passage, as in LAMBADA (arXiv:1606.06031)

The same Python version draws the same files.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titan.contrib.evaluation.examples import FOLDER

NUM_EXAMPLES = 200
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "urllib", "xml")  # fmt: skip


def docstrings() -> Iterator[str]:
    """Yield the paragraphs of prose of all docstrings, each in one line, without repetitions."""
    root, seen = Path(sysconfig.get_path("stdlib")), set()
    files = [*root.glob("*.py"), *(f for name in PACKAGES for f in (root / name).rglob("*.py"))]
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(paragraph.split())
                # Prose only: no code, tables or signatures.
                if re.fullmatch(r"[A-Z][A-Za-z0-9 ,.;'()-]+\.", text) and text not in seen:
                    seen.add(text)
                    yield text


def choice(texts: list[str], draw: random.Random) -> Iterator[dict[str, object]]:
    """Yield questions: a sentence of at least twelve words, cut in its middle, with its end and three others."""
    sentences = sorted({s for t in texts for s in re.split(r"(?<=\.) ", t)})
    halves = [
        (" ".join(words[: len(words) // 2]), " " + " ".join(words[len(words) // 2 :]))
        for words in map(str.split, sentences)
        if 12 <= len(words) <= 30
    ]
    halves.sort(key=lambda half: (len(half[1]), half))
    for n in draw.sample(range(len(halves)), min(NUM_EXAMPLES, len(halves))):
        near = [end for _, end in halves[max(n - 15, 0) : n + 16] if end != halves[n][1]]
        choices = [halves[n][1], *draw.sample(sorted(set(near)), 3)]
        draw.shuffle(choices)
        yield {
            "context": halves[n][0],
            "choices": choices,
            "answer": choices.index(halves[n][1]),
        }


def cloze(texts: list[str], draw: random.Random) -> Iterator[dict[str, object]]:
    """Yield passages of at least twenty words, and their last word of at least four letters, which they have before."""
    found = []
    for text in sorted(texts):
        context, _, last = text.removesuffix(".").rpartition(" ")
        words = re.findall(r"\w+", context.lower())
        if 20 <= len(words) <= 80 and re.fullmatch(r"[a-z]{4,}", last) and last in words:
            found.append({"context": context, "target": f" {last}"})
    yield from draw.sample(found, min(NUM_EXAMPLES, len(found)))


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    texts = [*docstrings()]
    for name, kind in (("stdlib_choice", choice), ("stdlib_cloze", cloze)):
        rows = [*kind(texts, random.Random(name))]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(rows)} examples")


if __name__ == "__main__":
    main()
