"""Commands of `titan`, as data. Imports no large package: `titan --help` reads all of it.

An installed package adds commands through the entry point group `titan.commands` (titan/config/plug_ins.py). titan's own
commands keep their names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.base.signals import die_with_launcher
from titan.config.plug_ins import load_plug_in, plug_ins

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
COMMANDS: dict[str, tuple[str, str]] = _DATA["commands"]
"""By name: the line in `titan --help`, and the function, whose module is imported when it runs."""
GROUPS: dict[str, list[str]] = _DATA["groups"]
"""Commands in the order of `titan --help`. Those that titan/contrib adds have their places, too."""
ALIASES: dict[str, list[str]] = _DATA["aliases"]
"""Other words for titan's commands, mostly of other programs."""
GONE: dict[str, str] = _DATA["gone"]
"""Advice about commands that titan does not have."""


def command_groups() -> dict[str, list[str]]:
    """Return the names of all commands, by the groups of `titan --help`. The last one has what other packages add."""
    known = {*(name for name in COMMANDS if not missing_part(name)), *_added()}
    groups = {title: [n for n in names if n in known] for title, names in GROUPS.items()}
    named = [name for names in groups.values() for name in names]
    return groups | {"of other packages": sorted(known - {*named})}


def command_names() -> list[str]:
    """Return the names of all commands, in the order of `titan --help`."""
    return [name for names in command_groups().values() for name in names]


@cache
def missing_part(name: str) -> str:
    """Return the folder of one of titan's own commands, such as "titan/sim", if it is not installed. Else ""."""
    if name not in COMMANDS:
        return ""
    part = ".".join(COMMANDS[name][1].partition(":")[0].split(".")[:2])
    found = find_spec(part)
    return "" if found and found.origin else part.replace(".", "/")


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function behind a command.

    Args:
        name: name of the command.

    Raises:
        KeyError: There is no such command.
        ConfigError: The package that adds it cannot be imported.
    """
    if name not in COMMANDS:
        return load_plug_in(_added()[name])
    module, _, function = COMMANDS[name][1].partition(":")
    return getattr(import_module(module), function)


def summary_of(name: str) -> str:
    """Return a command's line in `titan --help`. For a command that a package adds, this imports its module."""
    if name in COMMANDS:
        return COMMANDS[name][0]
    try:
        return _first_line(_added()[name].load())
    except Exception as error:  # help must not fail because of a package
        return f"cannot be loaded: {type(error).__name__}: {error}"


def _first_line(function: Any) -> str:
    line = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _added() -> dict[str, EntryPoint]:
    entries = plug_ins("titan.commands")
    return {entry.name: entry for entry in entries if entry.name not in COMMANDS}


def prepare_process() -> str:
    """Open /dev/null for standard streams that a daemon did not give: a file opened later would get their text.

    It also lets this process end with titan's, or torchrun's, that has started it.

    Returns:
        Why no command can run here, or "".
    """
    die_with_launcher()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    try:
        Path.cwd()
    except OSError:
        return "the current folder does not exist any more; cd into another one"
    return ""
