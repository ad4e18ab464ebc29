"""A user's mistakes: what is wrong, where it stands, how it is told.

A `Problem` is one line, `file:line: key: message`; a `ConfigError` holds all of a run's problems, so that
they can be mended together. A `SourceMap` remembers where each key of a config was written, so that rules
which look at finished values can still point at a line. Keys are written as in
`data.sources[0].path`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isqrt
from typing import Any

from titan.untrusted import MAX_TEXT, printable

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line"
RuleViolation = tuple[str, str]
"""Key and message of a problem whose place is yet to be looked up."""


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` 0 means that there is no line to point at."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        parts = (printable(part, MAX_TEXT) for part in (place, self.key, self.message))
        return ": ".join(part for part in parts if part)


class ConfigError(Exception):
    """The user's configuration cannot be used; `str()` is the whole report: a line each, in the order of the files, and a count.

    partial: the `JobConfig` without what is wrong, for the rules to judge (UnknownValue); None where nothing could be read.
    """

    def __init__(self, problems: Iterable[Problem], *, partial: Any = None) -> None:
        self.partial = partial
        unique = list(dict.fromkeys(problems))
        files = [*dict.fromkeys(p.file for p in unique if p.file != COMMAND_LINE), COMMAND_LINE]
        self.problems = sorted(unique, key=lambda p: (files.index(p.file), p.line))
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        return "\n".join([*map(str, self.problems), f"{count} problem{'s' * (count != 1)}"])


class UnknownValue(Exception):
    """A rule reads a setting that was written wrongly, so that nobody knows its value."""


@dataclass(frozen=True)
class SourceLocation:
    """Where a value was written, and under which key (an older one, if it has been renamed)."""

    file: str
    line: int
    written: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def problem(self, message: str) -> Problem:
        return Problem(self.file, self.line, self.written, message)


@dataclass(eq=False)
class SourceMap:
    """Places of a config's keys, and warnings about how they were written.

    Not part of the config's value: any two origins are equal.
    """

    file: str = "config"
    line: int = 0
    locations: dict[str, SourceLocation] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceMap)

    def __hash__(self) -> int:
        return 0

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key`, at its own line, or that of the nearest table around it."""
        if place := self.locations.get(key):
            return place.problem(message)
        around = key
        while around:
            around = parent(around)
            if place := self.locations.get(around):
                return Problem(place.file, place.line, key, message)
        return Problem(self.file, self.line, key, message)


def key_text(path: Iterable[str | int]) -> str:
    """`("data", "sources", 0, "path")` as `data.sources[0].path`; odd names in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w-]+", part) else f'"{part}"'
            text += f".{name}" if text else name
    return text


def parent(key: str) -> str:
    """The key of the table or list that holds `key`; empty at the top."""
    return re.sub(r'(^|\.)("[^"]*"|[^.\[\]"]*)$|\[\d+\]$', "", key)


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice that `word` is the beginning of, or is most like, letter case aside, if there is one."""
    by_lower = {choice.lower(): choice for choice in choices}
    longer = [c for c in by_lower if c.startswith(word.lower() + "-")]  # h200-sxm of h200
    if len(word) >= 3 and longer:
        return by_lower[min(longer, key=len)]
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A hint to append to a message: the choice most like `word`, or nothing."""
    match = nearest(word, choices, cutoff=cutoff)
    return f"; did you mean '{match}'?" if match else ""


def choose(word: str, choices: Iterable[str]) -> str:
    """The choice most like `word`, if any, and all of them, to append to a message."""
    hint = did_you_mean(word, choices)
    return f"{hint} There are {', '.join(choices)}" if hint else f"; there are {', '.join(choices)}"


def divisors(whole: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def neighbours(value: int, ascending: list[int]) -> list[int]:
    """Return the nearest numbers below and above `value`."""
    return [n for n in ascending if n < value][-1:] + [n for n in ascending if n > value][:1]


def around(value: int, unit: int) -> list[int]:
    """Return the positive multiples of `unit` on either side of `value`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def violations_of(
    rule: Callable[[Any], Iterable[RuleViolation]], config: Any
) -> list[RuleViolation]:
    """Return what a rule finds before it reads a setting whose value nobody knows."""
    findings = []
    with suppress(UnknownValue):
        for finding in rule(config):
            findings.append(finding)  # noqa: PERF402 (those before the exception count)
    return findings


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a `ConfigError` to those found elsewhere, rather than stop at it."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
