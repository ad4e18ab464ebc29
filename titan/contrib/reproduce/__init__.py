"""Published runs, simulated and run again: `titan reproduce`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """List published runs; simulate one, submit it, compare what was measured."""
    from .cli import main

    return main([*argv])
