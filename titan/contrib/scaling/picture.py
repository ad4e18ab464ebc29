"""Picture of a law: losses of runs over FLOPs with the least loss that the law allows, and what the law leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .law import Fit, Run


def draw(found: Fit, runs: list[Run], file: Path) -> None:
    """Write the picture.

    Args:
        found: The law.
        runs: Runs that it was fitted to.
        file: PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    every = np.array([run.flops for run in runs])
    flops = np.geomspace(every.min(), every.max() * 3, 100)
    bands = []
    for law in [found.law, *found.draws]:
        params = np.array([law.best_params(each) for each in flops])
        bands.append(law.loss(params, flops / 6 / params))
    low, high = np.quantile(bands[1:], (0.05, 0.95), axis=0)
    upper.plot(flops, bands[0], color="black", label="least loss of the law")
    upper.fill_between(flops, low, high, color="black", alpha=0.15, label="90% interval")
    losses = np.array([run.loss for run in runs])
    expected = np.array([float(found.law.loss(run.params, run.tokens)) for run in runs])
    sizes = np.log10([run.params for run in runs])
    shown = upper.scatter(every, losses, c=sizes, label="runs", zorder=3)
    lower.scatter(every, 100 * (losses / expected - 1), c=sizes, zorder=3)
    figure.colorbar(shown, ax=[upper, lower], label="log10 of parameters")
    upper.set(ylabel="loss, nats per token", xscale="log")
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set(xlabel="training FLOPs, 6 N D", ylabel="loss over the law, %")
    upper.legend()
    figure.savefig(file, dpi=110, format="png")
