"""Data of tables.toml, and the options of the commands. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, add_options, command_parser
from titan.config.toml import tomllib

TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text("utf-8")
)


def parser_of(command: str) -> CommandParser:
    """Return the parser of a command's options, with --json."""
    about = TABLES[command]
    parser = command_parser(command, about["usage"].strip(), summary=summary_of(command))
    add_options(parser, about["options"])
    parser.add_json()
    return parser
