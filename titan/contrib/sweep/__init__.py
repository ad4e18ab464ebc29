"""Runs of a job with several settings and seeds: `titan sweep`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Train a job with several values of its keys and several seeds, and say which is better."""
    from .cli import main

    return main([*argv])
