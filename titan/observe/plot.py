"""`titan plot RUN... [--output FILE.png] [--x step|tokens|time]`: curves of one or several runs in one picture.

Above the loss: training thin, its running mean bold, validations as markers. Below the throughput. Reads nothing but
metrics.jsonl, of a long run the rows that show its course (rows.py). Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan.observe.rows import Row, RowFile, number
from titan.observe.sinks import MissingExtra, require

_X = ("step", "tokens", "time")


class PlotError(Exception):
    """The user's mistake, in a line."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's name in the legend, and its rows."""

    name: str
    rows: list[Row]

    def points(self, x: str, key: str) -> tuple[list[float], list[float]]:
        """x and y of every row that has the key."""
        x_key, unit = ("time_s", 3600) if x == "time" else (x, 1)
        both = ((number(row.get(x_key)), number(row.get(key))) for row in self.rows)
        kept = [(a / unit, b) for a, b in both if a is not None and b is not None]
        return [a for a, _ in kept], [b for _, b in kept]


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes."""
    parser = argparse.ArgumentParser(prog="titan plot", description="Loss and throughput as PNG.")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", type=Path, help="run folder, or a metrics.jsonl")
    add("--output", metavar="FILE.png", type=Path, help="default: curves.png in the first run")
    add("--x", choices=_X, default="step", help="horizontal axis")
    arguments = parser.parse_args(argv)
    try:
        require("matplotlib", extra="plot", asked_by="titan plot")
        output = arguments.output or _metrics_file(arguments.runs[0]).with_name("curves.png")
        draw(read_runs(arguments.runs), output=output, x=arguments.x)
    except (PlotError, MissingExtra, OSError) as error:
        print(f"titan plot: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


def read_runs(paths: list[Path]) -> list[Run]:
    """The rows of each run; names are as long as they must be to tell the runs apart."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [Run(name=n, rows=_read(p)) for n, p in zip(names, paths, strict=True)]


def _metrics_file(path: Path) -> Path:
    return path if path.is_file() else path / "metrics.jsonl"


def _read(path: Path) -> list[Row]:
    file = _metrics_file(path)
    if not file.is_file():
        near = sorted(p.parent for p in path.parent.glob("*/metrics.jsonl"))[:5]
        hint = f"; runs near it: {', '.join(map(str, near))}" if near else ""
        raise PlotError(f"{path}: no metrics.jsonl there, so not the folder of a run{hint}")
    rows = RowFile(file)
    rows.update()
    if rows.problem:
        raise PlotError(rows.problem)
    found = rows.thin.rows()
    if not found:
        what = (
            "no step was logged yet" if not rows.thin.count else "its lines are not rows of metrics"
        )
        raise PlotError(f"{file}: {what}")
    return found


def running_mean(values: list[float]) -> list[float]:
    """Mean over about a thirtieth of the curve around each point.

    Centred, with a window that shrinks towards both ends, so that it does not lag behind a falling loss.
    """
    sums = [0.0, *accumulate(values)]
    half = len(values) // 60
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def draw(runs: list[Run], *, output: Path, x: str) -> None:
    """Draw the picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 7.5), layout="constrained", dpi=120)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for place, run in enumerate(runs):
        _draw_run(run, x=x, colour=f"C{place % 10}", loss_axes=upper, speed_axes=lower)
    upper.set_ylabel("loss (nats per token)")
    lower.set_ylabel("tokens per second")
    lower.set_xlabel("hours since the first start" if x == "time" else x)
    lower.set_ylim(bottom=0)
    lower.yaxis.set_major_formatter(EngFormatter(sep=""))
    if x != "time":
        lower.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")


def _draw_run(run: Run, *, x: str, colour: str, loss_axes: Any, speed_axes: Any) -> None:
    at, loss = run.points(x, "loss")
    loss_axes.plot(at, loss, color=colour, linewidth=0.8, alpha=0.35)
    loss_axes.plot(at, running_mean(loss), color=colour, linewidth=2, label=f"{run.name}: training")
    at, validation = run.points(x, "validation_loss")
    if at:
        label = f"{run.name}: validation (last {validation[-1]:.4f})"
        loss_axes.plot(
            at, validation, "o", color=colour, markersize=6, markeredgecolor="white", label=label
        )
    at, speed = run.points(x, "tokens_per_s")
    speed_axes.plot(at, speed, color=colour, linewidth=1.2)
