"""Options of the commands of this folder, from options.toml. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, add_options, command_parser
from titan.config.toml import tomllib

OPTIONS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("options.toml").read_text("utf-8")
)


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
