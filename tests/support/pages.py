"""The pages of the documentation: their fenced blocks, the commands in them, and the real parsers of these commands.

tests/test_page_commands.py runs each command of a page in a folder of the page. tests/page_commands.toml says what runs in place of
a command that needs GPUs, a cluster, the internet or hours.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.jobs import ROOT
from titan.commands import ALIASES, command_names, load_command
from titan.config.errors import ConfigError
from titan.config.load import load_config, parse_args
from titan.config.options import CommandParser

# Readers replace these words. One value each, for all pages.
PLACEHOLDERS = {
    "JOB.toml": "job.toml",
    "OVERLAY.toml": "job.toml",
    "JOB": "job.toml",
    "FILE": "job.toml",
    "RUN/config.toml": "run/config.toml",
    "RUN": "run",
    "RUN_DIR": "run",
    "STEP_DIR": "run/checkpoint/step-4",
    "DIR/plan-1.toml": "plans/plan-1.toml",
    "OUT": "out",
    "FOLDER": "out",
    "F": "out",
    "N": "8",
    "R": "0",
    "C": "4",
    "H": "h100-sxm",
    "PID": "1",
}
# What was, and commands that there were.
HISTORY = ("CHANGELOG.md", "docs/log.md")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the word after the fence, and the first line's number."""

    page: str
    line: int
    language: str
    text: str


@cache
def pages() -> dict[str, str]:
    """Return the text of each page by its path in the repository."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    files += ROOT.glob("titan/**/*.md")
    files += [ROOT / folder / "README.md" for folder in ("models", "tests")]
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in sorted(files)
    }


PRESENT = [page for page in pages() if page not in HISTORY]


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page in these languages, in order; without any, all blocks."""
    found = re.finditer(
        r"^```(\w*)[^`\n]*\n(.*?)^```$", pages()[page], re.MULTILINE | re.DOTALL
    )
    every = [
        Block(page, pages()[page].count("\n", 0, match.start()) + 2, match[1], match[2])
        for match in found
    ]
    return [block for block in every if not languages or block.language in languages]


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a block as a shell reads them: lines joined, here-documents whole, without comments.

    A block of "console" has them after a `$`, and what they print below.
    """
    lines = iter(block.text.splitlines())
    if block.language == "console":
        lines = iter([line[2:] for line in lines if line.startswith("$ ")])
    for line in lines:
        command = _without_comment(line)
        while command.endswith("\\"):
            command = f"{command[:-1].rstrip()} {_without_comment(next(lines)).lstrip()}"
        if end := re.search(r"<<\s*'?(\w+)'?", command):
            for line in lines:
                command += f"\n{line}"
                if line == end[1]:
                    break
        if command:
            yield command


def page_commands(page: str) -> list[str]:
    """Return all commands of a page's blocks, in order."""
    return [command for block in blocks(page, "bash", "console") for command in commands(block)]


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s+)#.*", "", line).rstrip()


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", pages()[page], flags=re.MULTILINE | re.DOTALL)


def links(page: str) -> list[str]:
    """Return the targets of a page's links and pictures, except those on other hosts."""
    text = re.sub(r"`[^`\n]*`", "`", prose(page))
    found = re.findall(
        r"\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", text, re.MULTILINE
    )
    return [link for groups in found for link in groups if link and not re.match(r"\w+:", link)]


@cache
def slugs(page: str) -> set[str]:
    """Return the names of a page's headings that GitHub and MkDocs both give them."""
    both: list[set[str]] = []
    headings = re.findall(r"^#+\s+(.+?)\s*$", prose(page), re.MULTILINE)
    # GitHub keeps each space as a dash, Python's Markdown makes one of several; they number repetitions differently.
    for spaces, number in ((r"\s", "-"), (r"[-\s]+", "_")):
        names: set[str] = set()
        for heading in headings:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading)
            name = re.sub(spaces, "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
            again = (f"{name}{number}{n}" for n in range(1, len(headings)))
            names.add(name if name not in names else next(n for n in again if n not in names))
        both.append(names)
    return both[0] & both[1]


def inline_commands(page: str) -> list[str]:
    """Return the commands that a page names in its text, such as `titan train --nproc N`."""
    return [
        code.replace("\n", " ")
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))
        if code.split()[0] in ("titan", "python", "torchrun") and " " in code.strip()
    ]


def runnable(command: str) -> str:
    """Return a command without its optional parts in brackets and the three dots, its placeholders filled in."""
    first, *document = command.split("\n")
    first = re.sub(r"\s\[[^\]]*\]|\s\.\.\.(?!\S)", "", first)
    return "\n".join([_filled_in(first), *document])


def _filled_in(text: str) -> str:
    return re.sub(r"[\w./-]+", lambda word: PLACEHOLDERS.get(word[0], word[0]), text)


# ---- parsing without running -------------------------------------------------------------------


class Parsed(Exception):
    """A parser of argparse has taken its options; `rest` is what it leaves to the command."""

    def __init__(self, rest: list[str]) -> None:
        super().__init__(rest)
        self.rest = rest


class Refused(AssertionError):
    """A real parser does not take a command of a page."""


def refusal(command: str, *, whole: bool) -> str:
    """Parse each program call of a command with its real parser. Return what is wrong, or nothing.

    Args:
        whole: whether the command would run as it is; otherwise it may lack arguments.
    """
    text = re.sub(r"[\[\]]", "", command.split("\n")[0])
    text = re.sub(r"(?<!\S)(\.\.\.|--section\.key=value)(?!\S)", "", text)
    for words in _calls(_filled_in(text)):
        if text.endswith("|| true"):  # a mistake that the page makes on purpose
            continue
        try:
            _check_call(words, whole=whole)
        except (Refused, ConfigError) as error:
            return f"{command}\n{error}"
    return ""


def _calls(text: str) -> Iterator[list[str]]:
    """Yield the words of each program call of a command, without redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if set(word) <= set("<>"):
            redirected = True
        elif set(word) <= set("|&;"):
            if words and words[0] == "nice":
                words = words[1:]
            if words:
                yield words
            words, redirected = [], False
        elif not redirected:
            words.append(word)


def _check_call(words: list[str], *, whole: bool) -> None:
    program, *rest = words
    if program == "titan":
        name, *rest = rest
        if name.startswith("-"):
            return
        name, *rest = (*ALIASES.get(name, (name,)), *rest)
        if name not in command_names():
            raise Refused(f"there is no command {name}")
        if name == "diff":  # keys of one of the two jobs
            rest = [re.sub(r"^--[ab]\.", "--", word) for word in rest]
        if "--script" in rest:  # all else with a value is an argument of its function
            rest = [word for word in rest if not re.match(r"--\w+=", word)]
        _check_main(load_command(name), rest, whole=whole)
    elif program == "torchrun":
        _check_launch(rest, whole=whole)
    elif program == "python" and rest[0] == "-m":
        module, *rest = rest[1:]
        if module == "titan.ops.cluster.node":
            _check_launch(rest, whole=whole)
        elif module.startswith("titan."):
            _check_main(module, rest, whole=whole)
        elif find_spec(module) is None:
            raise Refused(f"there is no module {module}")
    elif program == "python" and rest[0].endswith(".py"):
        _check_script(ROOT / rest[0], rest[1:], whole=whole)
    elif program.startswith("scripts/") and not (ROOT / program).exists():
        raise Refused(f"there is no {program}")


def _check_launch(words: list[str], *, whole: bool) -> None:
    """torchrun's parser takes the words before the program; the rest is the program's."""
    if not words:
        return
    from torch.distributed.run import get_args_parser

    try:
        options = get_args_parser().parse_args(words)
    except SystemExit:
        raise Refused("torchrun does not take these options") from None
    if options.module:
        _check_main(options.training_script, options.training_script_args, whole=whole)
    else:
        script = ROOT / options.training_script
        _check_script(script, options.training_script_args, whole=whole)


def _check_main(command: str | Callable[..., Any], words: list[str], *, whole: bool) -> None:
    name = (
        {"titan.train": "titan.cli"}.get(command, command) if isinstance(command, str) else ""
    )
    if name == "titan.ops.preflight":
        name = "titan.ops.preflight.cli"
    if name == "titan.cli":
        return _check_main(load_command("train"), words, whole=whole)
    main = import_module(name).main if name else command
    assert callable(main)
    _check_parser(lambda: main(words), whole=whole)


def _check_script(script: Path, words: list[str], *, whole: bool) -> None:
    if not script.exists():
        raise Refused(f"there is no {script}")
    if "argparse" in script.read_text():
        path = [str(script.parent), *sys.path]
        with mock.patch.multiple(sys, argv=[str(script), *words], path=path):
            _check_parser(lambda: runpy.run_path(str(script), run_name="__main__"), whole=whole)


def _check_parser(run: Callable[[], object], *, whole: bool) -> None:
    """Call a program until its parser has taken the words; a job among them is checked, too."""
    parse = argparse.ArgumentParser.parse_known_args
    depth = 0

    def parse_known(self: argparse.ArgumentParser, *args: Any, **keywords: Any) -> Any:
        nonlocal depth
        if not whole:
            for action in (*self._actions, *self._mutually_exclusive_groups):
                action.required = False
            for action in self._actions:
                if not action.option_strings and action.nargs is None:
                    action.nargs = "?"
        depth += 1
        try:
            namespace, rest = parse(self, *args, **keywords)
        finally:
            depth -= 1
        if depth:  # a subcommand's parser, called by that of the command
            return namespace, rest
        raise Parsed(rest)

    def parse_all(self: argparse.ArgumentParser, *args: Any, **keywords: Any) -> Any:
        try:
            return self.parse_known_args(*args, **keywords)
        except Parsed as parsed:
            if parsed.rest:
                raise Refused(f"no such options: {parsed.rest}") from None
            raise

    def error(self: argparse.ArgumentParser, message: str) -> None:
        if not whole and message.endswith("expected one argument"):
            raise Parsed([])
        raise Refused(message)

    patches = {"parse_known_args": parse_known, "parse_args": parse_all, "error": error}
    with (
        mock.patch.multiple(argparse.ArgumentParser, **patches),
        mock.patch.object(CommandParser, "error", error),
        mock.patch.dict(os.environ),
    ):
        try:
            run()
        except Parsed as parsed:
            if parsed.rest:
                _check_job(parsed.rest)
            return
    raise Refused("it parsed no options")


def _check_job(words: list[str]) -> None:
    """Check the keys of a job on a command line. Raises `ConfigError` or `Refused`."""
    if not any(
        word.split("=")[0].endswith(".toml") and not word.startswith("-") for word in words
    ):
        words = ["job.toml", *words]
    arguments = parse_args(words)
    try:
        load_config(ROOT / "train_configs/debug_model.toml", overrides=arguments.overrides)
    except ConfigError as error:
        # A value may need the page's own job, and so a key that depends on it.
        unknown = [str(problem) for problem in error.problems if "unknown" in problem.message]
        if unknown:
            raise Refused("\n".join(unknown)) from None
