"""Options of a command beside its job: `titan COMMAND JOB.toml [OVERLAY.toml ...] [--section.key=value ...] [--option ...]`.

argparse takes a command's own options out. The rest of the line is the job, which titan.config.load parses. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .errors import ConfigError

_QUIET = "TITAN_QUIET"
JOB = "JOB.toml [OVERLAY.toml ...] [--section.key=value ...]"
TRUST_OPTION: dict[str, Any] = {
    "action": "store_true",
    "help": "run the Python code that the checkpoint's model has in the folder of model.hf_path; read it first",
}


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's own options, in one grammar: what it means is called the same in all commands.

    The number of ranks is --nproc or --world-size, a file or folder to write --output or --out. Mistakes are raised as ConfigError.
    """

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:  # pyrefly: ignore[bad-override]
        """Add an option, with the other name that all commands take for it."""
        for alike in (("--nproc", "--world-size"), ("--output", "--out")):
            if not {*alike}.isdisjoint(names):
                names = (*names, *(name for name in alike if name not in names))
        return super().add_argument(*names, **settings)

    def add_json(self) -> None:
        """Add `--json [FILE]`. `put_json` writes the answer."""
        self.add_argument(
            "--json",
            nargs="?",
            const="-",
            type=_json_target,
            metavar="FILE",
            help="print the answer as JSON, or write it to FILE",
        )

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:  # pyrefly: ignore[bad-override]
        """Parse the options. The second part of the result is the job."""
        words = [*(sys.argv[1:] if args is None else args)]
        if "--json" in words[:-1]:
            place = words.index("--json")
            if self._is_subject(words[place + 1], [*words[:place], *words[place + 2 :]]):
                words[place] = "--json=-"
        return super().parse_known_args(words, namespace)

    def _is_subject(self, word: str, others: list[str]) -> bool:
        """Return whether the word after --json is the job or run that the command is about, not a file to write."""
        if word.endswith(".toml") or "://" in word or Path(word).is_dir():
            return True
        # What is not there yet is to be written, and so is what a command without such words gets: a job ends in .toml.
        takes_words = any(not action.option_strings for action in self._actions)
        if not takes_words or not Path(word).exists():
            return False
        # A command about nothing does not exist: if no other word is its subject, this one is.
        is_value = False
        for other in others:
            if not other.startswith("-") and not is_value:
                return False
            action = self._option_string_actions.get(other)
            is_value = other.startswith("--") and "=" not in other
            is_value = is_value and (action is None or action.nargs is None)
        return True

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError in place of argparse's usage and exit."""
        from .errors import did_you_mean, foreign

        named = re.fullmatch(r"argument (--[\w-]+)?\S*: (.*)", message, re.DOTALL)
        key, text = (named[1] or "", named[2]) if named else ("", message)
        text = re.sub(
            r"^invalid (?:int|positive) value: ", "expected a whole number, got ", text
        )
        text = re.sub(r"^invalid float value: ", "expected a number, got ", text)
        if missing := text.partition("the following arguments are required: ")[2]:
            missing = re.sub(r"/--[\w-]+", "", missing)
            text = f"{missing}: missing; `{self.prog} --help` explains"
        if unknown := text.partition("unrecognized arguments: ")[2]:
            key = unknown.split()[0]
            options = [*self._option_string_actions]
            hint = foreign(key, options) or did_you_mean(key, options)
            text = f"unknown{hint}"
        raise mistake(key, text)


def command_parser(name: str, arguments: str = "", *, summary: str) -> CommandParser:
    """Return a parser for the options of `titan NAME`.

    Args:
        name: name of the command.
        arguments: the usage line after the name of the command. Empty: argparse makes it.
        summary: description of the command, for --help.
    """
    return CommandParser(
        prog=f"titan {name}",
        usage=f"titan {name} {arguments}" if arguments else None,
        description=summary,
        allow_abbrev=False,  # otherwise --section.key of the job could be taken for an option
    )


def known_options(parser: argparse.ArgumentParser) -> list[str]:
    """Return a parser's options, so that a misspelled option is not taken for a key of the config."""
    return [option for action in parser._actions for option in action.option_strings]


def mistake(option: str, message: str) -> ConfigError:
    """Return the error of a wrong option, to be raised.

    Args:
        option: the option, such as "--memory".
        message: the rule that it breaks.
    """
    # pydantic comes with it, which `titan --help` does without.
    from .errors import COMMAND_LINE, ConfigError, Problem

    return ConfigError([Problem(COMMAND_LINE, 0, option, message)])


def check_target(option: str, target: Path, *, is_folder: bool = False) -> None:
    """Raise ConfigError if a file cannot be written, or files in a folder, which is made if it is not there.

    This comes first: a file that cannot be written would cost minutes of work.
    """
    folder = target if is_folder else target.parent
    try:
        if is_folder:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise mistake(option, f"there is no folder {folder}")
        if is_folder or not target.exists():
            TemporaryFile(dir=folder).close()
        elif not (
            target.is_fifo() or target.is_char_device()
        ):  # a pipe would wait for its reader
            target.open("ab").close()
    except FileExistsError:
        raise mistake(option, f"{target} is a file; name a folder") from None
    except OSError as error:
        raise mistake(option, f"cannot write {target}: {error.strerror}") from None


def _json_target(text: str) -> str:
    if text != "-":
        file = Path(text)
        # Rather than write over a job or a table that was named by mistake.
        if file.is_file() and file.stat().st_size:
            with file.open("rb") as opened:
                if file.suffix == ".toml" or opened.read(1) not in (b"{", b"["):
                    raise mistake("--json", f"{file} exists and holds no JSON: name another")
        check_target("--json", file)
    return text


def put_json(data: object, target: str | None, *, indent: int | None = 2) -> bool:
    """Write the answer of a command where --json says, if anywhere.

    Return whether it went to standard output, "-", which is then no place for a page.
    """
    text = json.dumps(data, indent=indent)
    if target == "-":
        print(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")
    return target == "-"


def whole(text: str, least: int = 0, digits: int = 6) -> int:
    """Parse an option's whole number. argparse reports the error with the option's name."""
    is_number = re.fullmatch(r"\d+", text, re.ASCII)
    # int() takes seconds for a million digits, and Python refuses more than 4300.
    if is_number and len(text) > digits:
        raise argparse.ArgumentTypeError(
            f"expected less than {10**digits:,}, got {text[:40]!r}"
        )
    if not is_number or int(text) < least:
        at_least = f" of at least {least}" if least else ""
        raise argparse.ArgumentTypeError(
            f"expected a whole number{at_least}, got {text[:40]!r}"
        )
    return int(text)


def positive(text: str) -> int:
    """Parse an option's whole number of at least 1."""
    return whole(text, least=1)


def add_options(
    parser: argparse._ActionsContainer,
    options: Iterable[Mapping[str, Any]],
    **types: Callable[[str], Any],
) -> None:
    """Add options that a table in TOML describes.

    Args:
        parser: the parser, or a group of its options.
        options: of each option its names as `name`, and the settings of `add_argument`.
        types: functions that parse a value, by the name that the table has for them. int,
            float, path, positive and whole are known.
    """
    known = {
        "int": int,
        "float": float,
        "path": Path,
        "positive": positive,
        "whole": whole,
        **types,
    }
    for option in options:
        settings = {key: value for key, value in option.items() if key != "name"}
        if "type" in settings:
            settings["type"] = known[settings["type"]]
        parser.add_argument(*option["name"].split(), **settings)


def table_parser(
    name: str, table: Mapping[str, Any], **types: Callable[[str], Any]
) -> CommandParser:
    """Return a parser for the options of `titan NAME`, which a table in TOML describes.

    Args:
        name: name of the command.
        table: `summary`, `options`, `usage` if argparse is not to make it, and `one_of`, options that exclude each other;
            `needs_one` of them.
        types: see `add_options`.
    """
    parser = command_parser(name, table.get("usage", "").strip(), summary=table["summary"])
    if "one_of" in table:
        group = parser.add_mutually_exclusive_group(required=table.get("needs_one", False))
        add_options(group, table["one_of"], **types)
    add_options(parser, table["options"], **types)
    return parser


def add_new_layout(parser: argparse.ArgumentParser) -> None:
    """Add `--new-layout` to a command that starts a run."""
    parser.add_argument(
        "--new-layout",
        action="store_true",
        help='with parallelism.layout = "auto": choose again, rather than keep the layout of the run folder',
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add `-q`, `--quiet` to a command that reports its progress. `is_quiet` then returns True."""
    parser.add_argument(
        "-q",
        "--quiet",
        nargs=0,
        action=_Quiet,
        help="print only warnings, errors and the result",
    )


def is_quiet() -> bool:
    """Return whether this process, or the process that started it, was called with --quiet."""
    return os.environ.get(_QUIET, "0") not in ("", "0")


class _Quiet(argparse.Action):
    """Action that records the option in the environment, which ranks and background processes inherit."""

    def __call__(self, *_: Any) -> None:
        os.environ[_QUIET] = "1"
