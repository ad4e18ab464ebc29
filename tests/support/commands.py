"""Commands as tests call them: a line as a user types it, through titan's door, which reports mistakes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from titan import cli


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs `titan NAME` with arguments, and gives the exit code."""
    return lambda argv: cli.main([name, *argv])


def finished(
    command: Sequence[Any], *, code: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and require its exit code; None: any."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    return done


class Shell:
    """Runs command lines in this process, and requires their exit code.

    Args:
        capsys: pytest's fixture that reads what is printed.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._read = capsys.readouterr

    def __call__(self, line: str, *more: str, code: int = 0) -> Any:
        """Run a line, whose words have no spaces, with `more` words; return what it printed: `out` and `err`."""
        self._read()
        found = cli.main([*line.split(), *more])
        printed = self._read()
        assert found == code, printed.err
        return printed

    def refuse(self, line: str, *more: str) -> str:
        """Run a line that is a mistake; return what it says to stderr."""
        return self(line, *more, code=2).err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
