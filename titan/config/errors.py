"""Mistakes of a user: their cause, their place, and their report.

A `Problem` is one line of a report, `file:line: key: message`. A `ConfigError` contains all problems of a job, so that they can
be fixed together. A `SourceMap` remembers where each key was written, so that rules about values can point at a line. A key is
written like `data.sources[0].path`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

from titan.base.failure import UserError
from titan.base.untrusted import MAX_TEXT, printable

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
Table = dict[str, Any]
"""A table of TOML, whose values may be tables."""
COMMAND_LINE = "command line"
RuleViolation = tuple[str, str]
"""Key and message of a problem. A `SourceMap` adds file and line."""
Violations = Iterator[RuleViolation]
"""Violations that a rule finds."""


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        file: file of the mistake, or "command line".
        line: its line, or 0 if there is none.
        key: key of the setting.
        message: the value, the rule and the fix.
        paste: lines for the job file that correct the mistake.
    """

    file: str
    line: int
    key: str
    message: str
    paste: tuple[str, ...] = ()

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        # Names and values may come from files that anyone may have written.
        parts = (printable(part, MAX_TEXT) for part in (location, self.key, self.message))
        lines = [": ".join(part for part in parts if part)]
        return "\n".join([*lines, *(f"    {printable(line, MAX_TEXT)}" for line in self.paste)])


class ConfigError(UserError):
    """Error about an unusable configuration. `str()` has a line for each problem, in the order of the files, and their count.

    Attributes:
        problems: all problems, sorted by file and line.
        partial: the `JobConfig` without the wrong settings, so that rules can check the rest (see UnknownValue). None if
            nothing could be read.
    """

    def __init__(self, problems: Iterable[Problem], *, partial: Any = None) -> None:
        self.partial = partial
        # Two rules may report the same problem.
        unique = list(dict.fromkeys(problems))
        # Files in the order in which they were first reported, the command line last.
        files = [*dict.fromkeys(p.file for p in unique if p.file != COMMAND_LINE), COMMAND_LINE]
        self.problems = sorted(unique, key=lambda p: (files.index(p.file), p.line))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [*map(str, self.problems)]
        return "\n".join([*lines, f"{len(lines)} problems"] if len(lines) > 1 else lines)


class UnknownValue(Exception):
    """Error of a rule that reads a setting whose value is unknown, because it was written wrongly."""


@dataclass(frozen=True)
class SourceLocation:
    """Place where a value was written.

    Attributes:
        file: file of the value, or "command line".
        line: its line, or 0 if there is none.
        written: key under which it was written. This is the old key if it has been renamed.
    """

    file: str
    line: int
    written: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def problem(self, message: str, paste: tuple[str, ...] = ()) -> Problem:
        """Return a problem at this place."""
        return Problem(self.file, self.line, self.written, message, paste)


@dataclass(eq=False)
class SourceMap:
    """Locations of a config's keys, and warnings about how they were written.

    A source map is not part of the config's value, so any two are equal.
    """

    file: str = "config"
    line: int = 0
    locations: dict[str, SourceLocation] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceMap)

    def __hash__(self) -> int:
        return 0

    def problem(self, key: str, message: str, paste: tuple[str, ...] = ()) -> Problem:
        """Return a problem with `key`, at its line, or at the line of the nearest table around it."""
        # A missing key has no line, but its table may have one.
        around = key
        while around and around not in self.locations:
            around = parent(around)
        place = self.locations.get(around, SourceLocation(self.file, self.line, key))
        written = place.written if around == key else key
        return Problem(place.file, place.line, written, message, paste)


def key_text(path: Iterable[str | int]) -> str:
    """Return `("data", "sources", 0, "path")` as `data.sources[0].path`. Unusual names are in quotes."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w-]+", part) else f'"{part}"'
            text += f".{name}" if text else name
    return text


def parent(key: str) -> str:
    """Return the key of the table or list that contains `key`, or "" at the top."""
    found = re.sub(r'(^|\.)("[^"]*"|[^.\[\]"]*)$|\[\d+\]$', "", key)
    return found if found != key else ""  # a name with a bracket is no key


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice that begins with `word` or is most like it, in any letter case, or None if no choice is close."""
    # An abbreviation is likelier than a misspelling.
    by_lower = {choice.lower(): choice for choice in choices}
    longer = [c for c in by_lower if c.startswith(word.lower() + "-")]  # h200-sxm for h200
    if len(word) >= 3 and longer:
        return by_lower[min(longer, key=len)]
    matches = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint to append to a message: the choice most like `word`, or nothing."""
    match = nearest(word, choices, cutoff=cutoff)
    return f"; did you mean '{match}'?" if match else ""


@cache
def _foreign_words() -> dict[str, str]:
    file = Path(__file__).with_name("foreign_words.json")
    hints: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    return {word: hint for hint, words in hints.items() for word in words}


def foreign(word: str, options: Iterable[str] = ()) -> str:
    """Return a hint to append to a message, if other frameworks have this key or option: what titan has in its place, or nothing.

    Args:
        word: the key, or the option with its dashes.
        options: of the command. Some words stand for one of these.
    """
    name = word.lstrip("-").lower().replace("-", "_")
    known = _foreign_words()
    hint = known.get(name, "")
    if not hint and word.startswith("-"):
        hint = known.get(f"--{name}", "")
        named = re.findall(r"--[a-z-]+", hint)
        hint = hint if not named or {*named} & {*options} else ""
    return f"; {hint}" if hint else ""


def hub_fix(name: str) -> str:
    """Return a hint to append to a message about a folder that is not there: how to fetch it, if its name may be an id at the hub.

    Args:
        name: path as the user wrote it, such as "mistralai/Mistral-7B-v0.1".
    """
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+(?<!\.json)", name):
        return ""
    folder = name.partition("/")[2]
    return f"; if it is a model at the hub, fetch it: hf download {name} --local-dir {folder}"


def choose(word: str, choices: Iterable[str]) -> str:
    """Return a hint to append to a message: the choice most like `word`, if any, and all choices."""
    hint = did_you_mean(word, choices)
    return (
        f"{hint} There are {', '.join(choices)}"
        if hint
        else f"; there are {', '.join(choices)}"
    )


def divisors(whole: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, isqrt(whole) + 1) if whole % d == 0]
    return sorted({*small, *(whole // d for d in small)})


def near(value: int, ascending: list[int]) -> str:
    """Return the nearest numbers below and above `value` as text: "4 or 8"."""
    below = [n for n in ascending if n < value]
    above = [n for n in ascending if n > value]
    return either(below[-1:] + above[:1])


def around(value: int, unit: int) -> list[int]:
    """Return the positive multiples of `unit` on either side of `value`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def either(values: list[int]) -> str:
    """Return the values as text: "4 or 8"."""
    return " or ".join(map(str, values))


def problems_of(
    rule: Callable[..., Iterable[Any]], config: Any, *arguments: Any, section: str = ""
) -> list[Problem]:
    """Return the problems that a rule finds before it reads a setting whose value is unknown.

    Args:
        rule: yields the key and the message of each problem, and possibly lines to paste.
        config: the job, which is the rule's first argument.
        *arguments: the rule's other arguments.
        section: section of the keys without a dot.
    """
    problems = []
    with suppress(UnknownValue):
        for key, *rest in rule(config, *arguments):
            if section and not re.search(r"[.[]", key):
                key = f"{section}.{key}"
            problems.append(config.source_map.problem(key, *rest))
    return problems


def readable(
    problems: list[Problem], load: Callable[..., T], *arguments: Any, **options: Any
) -> T | None:
    """Call a function that loads something.

    If it raises `ConfigError`, add the problems, and return the part that could be read.
    """
    try:
        return load(*arguments, **options)
    except ConfigError as error:
        problems += error.problems
        return error.partial
