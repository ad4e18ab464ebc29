"""Options of the commands of this folder, from options.toml. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, command_parser, positive
from titan.config.toml import tomllib

OPTIONS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("options.toml").read_text("utf-8")
)

_TYPES: dict[str, Callable[[str], Any]] = {
    "path": Path,
    "positive": positive,
    "int": int,
    "float": float,
}


def add_options(
    parser: argparse._ActionsContainer,
    options: Iterable[Mapping[str, Any]],
    **types: Callable[[str], Any],
) -> None:
    """Add options that a file describes.

    Args:
        parser: a parser, or a group of options of which a command takes one.
        options: for each option its `name`, and what `add_argument` takes. A type has a name, such as "path".
        **types: further types by their names.
    """
    for option in options:
        settings = dict(option)
        name = settings.pop("name")
        if "type" in settings:
            settings["type"] = (_TYPES | types)[settings["type"]]
        parser.add_argument(name, **settings)


def parser_of(command: str, **types: Callable[[str], Any]) -> CommandParser:
    """Return the parser of a command.

    Args:
        command: the command.
        **types: types of its options by name, as for `add_options`.
    """
    about = OPTIONS[command]
    summary = about.get("summary") or summary_of(command)
    parser = command_parser(command, about.get("usage", "").strip(), summary=summary)
    if "one_of" in about:
        group = parser.add_mutually_exclusive_group(required=about.get("needs_one", False))
        add_options(group, about["one_of"], **types)
    add_options(parser, about["options"], **types)
    return parser
