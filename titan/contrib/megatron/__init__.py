"""Checkpoints and token files of Megatron-LM, read without it (README.md)."""

from __future__ import annotations

from typing import Any

from titan.config.options import add_options
from titan.config.toml import table_beside


def add_way(ways: Any) -> None:
    """Add `from-megatron` to `titan convert`."""
    command = ways.add_parser(
        "from-megatron", help="make a checkpoint of Megatron's torch_dist"
    )
    add_options(command, table_beside(__file__, "options.toml")["options"])
    command.set_defaults(convert=convert_checkpoint)


def convert_checkpoint(**options: Any) -> list[str]:
    """Convert a checkpoint (convert.py). Return messages."""
    from .convert import from_megatron

    return from_megatron(**options)
