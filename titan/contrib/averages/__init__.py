"""Averages of weights: over the steps of a run ([average]), and of checkpoints (`titan average`)."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Write the mean of the weights of checkpoints."""
    from .command import main  # imports torch

    return main(argv)
