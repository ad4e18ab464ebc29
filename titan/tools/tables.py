"""Options of the commands of this folder, from options.toml. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, table_parser
from titan.config.toml import table_beside

OPTIONS: dict[str, Any] = table_beside(__file__, "options.toml")


def parser_of(command: str, **types: Callable[[str], Any]) -> CommandParser:
    """Return the parser of a command.

    Args:
        command: the command.
        **types: types of its options by name, as for `add_options`.
    """
    about = OPTIONS[command]
    summary = about.get("summary") or summary_of(command)
    parser = table_parser(command, {**about, "summary": summary}, **types)
    if about.get("answers_json"):
        parser.add_json()
    return parser
