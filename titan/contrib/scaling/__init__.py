"""A scaling law fitted to runs: `titan scaling`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Fit the loss over model size and tokens to runs, with intervals, and predict larger runs."""
    from .cli import main

    return main([*argv])
