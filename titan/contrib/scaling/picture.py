"""Pictures of a sweep, a comparison and a law, for the option --plot of their commands."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from titan.base.untrusted import InputError
from titan.observe.sinks import require
from titan.sim.report.text import require_writable

from .law import LEVEL, Fit
from .paired import Curve, mean_of
from .runs import number_in


def add_option(parser: ArgumentParser, about: str) -> None:
    """Add --plot to a command's options."""
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=about)


def require_option(options: Namespace) -> None:
    """Raise MissingExtra or ConfigError if there is --plot, and its picture cannot be drawn."""
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    require_writable(options, "plot")


def _figure(width: int, height: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=110, format="png")
    print(f"wrote {file}")


def draw_sweep(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the losses over the key that has most numbers as values, with a line for each setting of the others.

    Args:
        rows: Results of the runs.
        file: PNG file.

    Raises:
        InputError: No key has numbers, or no run is done.
    """
    done = [row for row in rows if row["loss"] is not None and row["state"] == "done"]
    values: dict[str, set[float]] = {}
    for key in done[0]["settings"] if done else ():
        numbers = {number_in(row["settings"][key]) for row in done}
        if all(map(math.isfinite, numbers)):
            values[key] = numbers
    if not values:
        raise InputError("--plot: no key has numbers as values, or no run is done")
    axis = max(values, key=lambda key: len(values[key]))
    lines: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in done:
        others = " ".join(f"{k}={v}" for k, v in row["settings"].items() if k != axis)
        lines[others][number_in(row["settings"][axis])].append(row["loss"])
    figure = _figure(8, 5)
    axes = figure.subplots()
    for others, points in sorted(lines.items()):
        x = sorted(points)
        [line] = axes.plot(x, [fmean(points[each]) for each in x], label=others or None)
        for each, losses in points.items():
            axes.scatter([each] * len(losses), losses, color=line.get_color(), s=14)
    if min(values[axis]) > 0 and max(values[axis]) >= 8 * min(values[axis]):
        axes.set_xscale("log")
    axes.set(xlabel=axis, ylabel="final loss, nats per token")
    if any(lines):
        axes.legend()
    _save(figure, file)


def draw_law(found: Fit, file: Path) -> None:
    """Draw the losses of a law's runs over FLOPs, those that the law expects, and the least loss of as many FLOPs."""
    import numpy as np

    figure = _figure(8, 5)
    axes = figure.subplots()
    _, params, tokens, losses = zip(*found.runs, strict=True)
    sizes, flops = np.array(params), np.array([run.flops for run in found.runs])
    best = found.law.best_params(flops)
    axes.scatter(flops, losses, label="runs")
    axes.scatter(flops, found.law.loss(sizes, np.array(tokens)), marker="x", label="law")
    axes.plot(flops, found.law.loss(best, flops / 6 / best), label="compute-optimal sizes")
    axes.set(xlabel="training FLOPs, 6 N D", ylabel="loss, nats per token", xscale="log")
    axes.legend()
    _save(figure, file)


def draw_comparison(pairs: Sequence[Sequence[Curve]], title: str, file: Path) -> None:
    """Draw the mean losses of two recipes, and their difference with its interval.

    Args:
        pairs: Losses over tokens of A and of B, for each seed.
        title: The answer, with the cost.
        file: PNG file.
    """
    import numpy as np

    figure = _figure(8, 7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    tokens = pairs[0][0][0]
    gaps: Any = 0
    for name, side, sign in zip("AB", zip(*pairs, strict=True), (-1, 1), strict=True):
        losses = np.array([np.interp(tokens, *curve) for curve in side])
        upper.plot(tokens, losses.mean(axis=0), label=name)
        gaps += sign * losses
    value, low, high = zip(*map(mean_of, gaps.T.tolist()), strict=True)
    lower.plot(tokens, value)
    lower.fill_between(tokens, low, high, alpha=0.2, label=f"{LEVEL:.0%} interval")
    lower.axhline(0, color="black", linewidth=0.8)
    upper.set(ylabel="loss", xscale="log", title=title)
    lower.set(xlabel="tokens", ylabel="loss of B less that of A")
    upper.legend()
    _save(figure, file)
