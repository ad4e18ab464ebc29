"""Scores of tasks during a run, `titan evaluate`, and texts beside a validation (README.md)."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Score tasks with a checkpoint or a Hugging Face folder."""
    from .evaluate import main  # imports torch

    return main(argv)
