"""Picture of a comparison, for the option --plot of its command."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan.observe.sinks import require
from titan.sim.report.text import require_writable

from .paired import LEVEL, Curve, mean_of


def require_option(options: Namespace) -> None:
    """Raise MissingExtra or ConfigError if there is --plot, and its picture cannot be drawn."""
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    require_writable(options, "plot")


@contextmanager
def _panels(file: Path, *, rows: int = 1) -> Iterator[Any]:
    """Yield the axes of a picture, or several above each other, and write it at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 + 2 * rows), layout="constrained")
    yield figure.subplots(rows, sharex=True)
    figure.savefig(file, dpi=110, format="png")
    print(f"wrote {file}")


def draw_comparison(pairs: Sequence[Sequence[Curve]], title: str, file: Path) -> None:
    """Draw the mean losses of two recipes, and their difference with its interval.

    Args:
        pairs: losses over tokens of A and of B, for each seed.
        title: the answer, with the cost.
        file: PNG file.
    """
    import numpy as np

    tokens = pairs[0][0][0]
    # (recipes, seeds, tokens)
    sides = [[np.interp(tokens, *curve) for curve in side] for side in zip(*pairs, strict=True)]
    losses_a, losses_b = np.array(sides)
    value, low, high = zip(*map(mean_of, (losses_b - losses_a).T.tolist()), strict=True)
    with _panels(file, rows=2) as (upper, lower):
        upper.plot(tokens, losses_a.mean(axis=0), label="A")
        upper.plot(tokens, losses_b.mean(axis=0), label="B")
        lower.plot(tokens, value)
        lower.fill_between(tokens, low, high, alpha=0.2, label=f"{LEVEL:.0%} interval")
        lower.axhline(0, color="black", linewidth=0.8)
        upper.set(ylabel="loss", xscale="log", title=title)
        lower.set(xlabel="tokens", ylabel="loss of B less that of A")
        upper.legend()
