"""Keys that nothing reads. Readers of other people's formats count them, and say so in one line.

    not read: tools in 2,000 of 2,000 rows; name in 30 of 4,000 messages

Rows and messages are counted while they are tokenized, and the counts stay with the tokens (shards.py). Of files with one table,
such as config.json, silent_keys.json lists the keys about which there is nothing to say.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from titan.base.untrusted import printable

Counts = dict[str, int]
"""Numbers of rows and messages: all of a kind ("rows"), and those with a key that nothing read ("rows tools")."""
_MOST = 100  # keys that are counted, since anyone may have written them


def count(counts: Counts, kind: str, keys: Iterable[str], *, of: int = 1) -> None:
    """Add the unread keys of `of` rows or messages to the counts."""
    counts[kind] = counts.get(kind, 0) + of
    for name in (f"{kind} {printable(key, 40)}" for key in keys):
        if name in counts or len(counts) < _MOST:
            counts[name] = counts.get(name, 0) + 1


def total(parts: Iterable[Mapping[str, int]]) -> Counts:
    """Return the sum of counts, in an order that does not depend on that of the parts."""
    counts = Counter[str]()
    for part in parts:
        counts.update(part)
    return dict(sorted(counts.items()))


def unread_line(counts: Mapping[str, int]) -> str:
    """Return the line for people, or "" if everything was read."""
    by_number: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, number in counts.items():
        kind, is_key, key = name.partition(" ")
        if is_key:
            by_number[kind, number].append(key)
    parts = [
        f"{', '.join(keys)} in {n:,} of {counts[kind]:,} {kind}"
        for (kind, n), keys in by_number.items()
    ]
    return f"not read: {'; '.join(parts)}" if parts else ""


def file_line(file: Path, keys: Iterable[str]) -> list[str]:
    """Return a warning about unread keys of a file, or an empty list."""
    silent = silent_keys(file.name)
    found = ", ".join(printable(key, 60) for key in keys if key.split(".")[-1] not in silent)
    return [f"{file}: not read: {found}"] if found else []


@cache
def silent_keys(name: str) -> frozenset[str]:
    """Return the keys of a file that change neither the ids of a text nor the output of a model."""
    file = Path(__file__).with_name("silent_keys.json")
    return frozenset(json.loads(file.read_text(encoding="utf-8")).get(name, ()))
