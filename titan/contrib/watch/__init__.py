"""Live page of runs: `titan watch`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Serve a live page of runs: curves, throughput, ranks, events."""
    from .cli import main

    return main([*argv])
