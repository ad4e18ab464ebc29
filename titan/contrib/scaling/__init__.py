"""A scaling law fitted to runs, and what it says of a budget: `titan scaling` and `titan budget`."""

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
