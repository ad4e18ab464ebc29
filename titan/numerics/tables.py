"""Data of tables.toml, and the options of the commands. Imports no torch."""

from __future__ import annotations

from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, table_parser
from titan.config.toml import table_beside

TABLES: dict[str, Any] = table_beside(__file__, "tables.toml")


def parser_of(command: str) -> CommandParser:
    """Return the parser of a command's options, with --json."""
    parser = table_parser(command, {**TABLES[command], "summary": summary_of(command)})
    parser.add_json()
    return parser
