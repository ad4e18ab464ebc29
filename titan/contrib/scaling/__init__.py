"""Recipes beside each other, with small runs: `titan sweep` and `titan compare`. docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence


def sweep_jobs(argv: Sequence[str]) -> int:
    """Train a job with several values of its keys and several seeds, and say which is better."""
    from .sweep import main

    return main([*argv])


def compare_jobs(argv: Sequence[str]) -> int:
    """Train two recipes side by side, and report the difference in loss, tokens and time."""
    from .compare import main

    return main([*argv])
