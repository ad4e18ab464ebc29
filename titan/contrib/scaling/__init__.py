"""From small runs to a large one: `titan sweep`, `titan compare`, `titan scaling` and `titan budget`. docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Fit the loss over model size and tokens to runs, with intervals, and predict larger runs."""
    from .cli import main

    return main([*argv])


def price_sizes(argv: Sequence[str]) -> int:
    """Compare sizes of a model by the loss that each would reach on some GPUs in some time."""
    from .budget import main

    return main([*argv])


def sweep_jobs(argv: Sequence[str]) -> int:
    """Train a job with several values of its keys and several seeds, and say which is better."""
    from .sweep import main

    return main([*argv])


def compare_jobs(argv: Sequence[str]) -> int:
    """Train two recipes side by side, and report the difference in loss, tokens, time and money."""
    from .compare import main

    return main([*argv])
