"""Data of tables.toml, and the options of the commands. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan.commands import summary_of
from titan.config.options import CommandParser, command_parser, positive
from titan.config.toml import tomllib

TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text("utf-8")
)
_TYPES = {"path": Path, "positive": positive}


def parser_of(command: str) -> CommandParser:
    """Return the parser of a command's options, with --json."""
    about = TABLES[command]
    parser = command_parser(command, about["usage"].strip(), summary=summary_of(command))
    for option in about["options"]:
        settings = {key: value for key, value in option.items() if key != "name"}
        if "type" in settings:
            settings["type"] = _TYPES[settings["type"]]
        parser.add_argument(option["name"], **settings)
    parser.add_json()
    return parser
