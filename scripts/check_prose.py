"""Measure the sentences of the pages in the root, in docs/ and beside the code: words on average and at most, and words to avoid.

    python scripts/check_prose.py [FILE...]      exit code 1 if a page is above a limit

Code, tables and headings do not count.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_ON_AVERAGE, MOST = 18, 40
# Old-fashioned or private words, and phrases that put the verb last.
FLAGGED = (
    "told|whereof|besides|one's own|of its own|of their own|mended|likewise|but for|thereof|therein|thereby|whence|hence|anew"
    "|aright|lest|whilst|amongst|upon|nought|naught|as there|is to be told|lies with"
)
_FLAGGED = re.compile(rf"\b({FLAGGED})\b", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?:])[)\"*`]*\s+(?=[\"`*(\[]*[A-Z0-9`])")


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Return each paragraph or list item with the number of its first line."""
    found: list[tuple[int, list[str]]] = []
    in_code, joined = False, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code, joined = not in_code, False
            continue
        is_code = in_code or (line.startswith("    ") and not joined)
        is_text = not is_code and line.strip() and not re.match(r"\s*(\||#|!\[|<)", line)
        if not is_text:
            joined = False
            continue
        item = re.match(r"\s*([-*]|\d+\.)\s+", line)
        if item or not joined:
            found.append((number, []))
        found[-1][1].append(line[item.end() :] if item else line.strip())
        joined = True
    return [(number, " ".join(lines)) for number, lines in found]


def sentences(text: str) -> list[tuple[int, str]]:
    """Return each sentence, with inline code and link targets cut to a word, and its paragraph's line."""
    result = []
    for number, paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`[^`]*`", "`code`", plain)
        result += [(number, sentence) for sentence in _END.split(plain) if sentence]
    return result


def check(file: Path) -> tuple[float, int, list[str]]:
    """Return the average and largest number of words of a sentence, and what is wrong, each with its line."""
    found = sentences(file.read_text())
    counts = [len(re.findall(r"[\w`'/.-]*\w[\w`'/.-]*", sentence)) for _, sentence in found]
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    problems = [
        f"{name}:{number}: {count} words: {sentence[:90]}"
        for (number, sentence), count in zip(found, counts, strict=True)
        if count > MOST
    ]
    for number, sentence in found:
        problems += [
            f'{name}:{number}: "{word[0]}": {sentence[:90]}'
            for word in _FLAGGED.finditer(sentence)
        ]
    average = sum(counts) / max(len(counts), 1)
    if average >= MOST_ON_AVERAGE:
        problems.append(f"{name}: {average:.1f} words a sentence on average")
    return average, max(counts, default=0), problems


def main() -> int:
    files = [Path(name).resolve() for name in sys.argv[1:]] or [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *sorted((ROOT / "docs").glob("**/*.md")),
        *sorted((ROOT / "titan").glob("**/README.md")),
        *(ROOT / folder / "README.md" for folder in ("models", "tests")),
    ]
    code = 0
    for file in files:
        average, most, problems = check(file)
        print(f"{average:5.1f} on average, {most:3} at most  {file.name}")
        print("\n".join(f"    {problem}" for problem in problems)) if problems else None
        code |= bool(problems)
    return code


if __name__ == "__main__":
    sys.exit(main())
