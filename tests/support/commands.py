"""Commands as tests call them: through titan's door, which reports mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from titan import cli


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs `titan NAME` with arguments, and gives the exit code."""
    return lambda argv: cli.main([name, *argv])
