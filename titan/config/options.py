"""Options of a command beside its job: `titan COMMAND JOB.toml [OVERLAY.toml ...] [--section.key=value ...] [--option ...]`.

argparse takes a command's own options out. The rest of the line is the job, which titan.config.load parses. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

_QUIET = "TITAN_QUIET"
JOB = "JOB.toml [OVERLAY.toml ...] [--section.key=value ...]"
TRUST_OPTION: dict[str, Any] = {
    "action": "store_true",
    "help": "run the Python code that the checkpoint's model has in the folder of model.hf_path; read it first",
}


def command_parser(name: str, arguments: str, *, summary: str) -> argparse.ArgumentParser:
    """Return a parser for the options of `titan NAME`.

    Args:
        name: name of the command.
        arguments: the usage line after the name of the command.
        summary: description of the command, for --help.
    """
    return argparse.ArgumentParser(
        prog=f"titan {name}",
        usage=f"titan {name} {arguments}",
        description=summary,
        allow_abbrev=False,  # otherwise --section.key of the job could be taken for an option
    )


def whole(text: str, least: int = 0) -> int:
    """Parse an option's whole number. argparse reports the error with the option's name."""
    is_number = re.fullmatch(r"\d+", text, re.ASCII)
    # int() takes seconds for a million digits, and Python refuses more than 4300.
    if is_number and len(text) > 6:
        raise argparse.ArgumentTypeError(f"expected less than a million, got {text[:40]!r}")
    if not is_number or int(text) < least:
        at_least = f" of at least {least}" if least else ""
        raise argparse.ArgumentTypeError(
            f"expected a whole number{at_least}, got {text[:40]!r}"
        )
    return int(text)


def positive(text: str) -> int:
    """Parse an option's whole number of at least 1."""
    return whole(text, least=1)


def add_new_layout(parser: argparse.ArgumentParser) -> None:
    """Add `--new-layout` to a command that starts a run."""
    help_text = 'with parallelism.layout = "auto": choose again, rather than keep the layout of the run folder'
    parser.add_argument("--new-layout", action="store_true", help=help_text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add `-q`, `--quiet` to a command that reports its progress. `is_quiet` then returns True."""
    help_text = "print only warnings, errors and the result"
    parser.add_argument("-q", "--quiet", nargs=0, action=_Quiet, help=help_text)


def is_quiet() -> bool:
    """Return whether this process, or the process that started it, was called with --quiet."""
    return os.environ.get(_QUIET, "0") not in ("", "0")


class _Quiet(argparse.Action):
    """Action that records the option in the environment, which ranks and background processes inherit."""

    def __call__(self, *_: Any) -> None:
        os.environ[_QUIET] = "1"
