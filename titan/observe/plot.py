"""Draw curves of one or several runs in one picture: `titan plot RUN... [--output FILE.png] [--x step|tokens|time]`.

The upper panel shows the loss: training thin, its running mean bold, validations as markers. The lower panel shows the
throughput. Reads only metrics.jsonl; rows.py thins a long one. Needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan.observe.rows import Row, RowFile, number, run_names, runs_near
from titan.observe.sinks import require
from titan.untrusted import InputError


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Raises InputError, which titan.cli reports."""
    parser = argparse.ArgumentParser(prog="titan plot", description="Loss and throughput as PNG.")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", type=Path, help="run folder, or a metrics.jsonl")
    add("--output", metavar="FILE.png", type=Path, help="default: curves.png in the first run")
    add("--x", choices=("step", "tokens", "time"), default="step", help="horizontal axis")
    arguments = parser.parse_args(argv)
    require("matplotlib", extra="plot", asked_by="titan plot")
    files = [run if run.is_file() else run / "metrics.jsonl" for run in arguments.runs]
    runs = dict(zip(run_names(arguments.runs), map(read_metrics, files), strict=True))
    output = arguments.output or files[0].with_name("curves.png")
    try:
        draw(runs, output=output, x=arguments.x)
    except OSError as error:
        raise InputError(f"titan plot: {error}") from None
    print(f"wrote {output}")
    return 0


def read_metrics(file: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, thinned. Raises InputError if there are none."""
    if not file.is_file():
        hint = runs_near(file.parent, ["metrics.jsonl"])
        raise InputError(f"titan plot: {file}: no such file, so not the folder of a run{hint}")
    # Thinned: a picture of a thousand pixels cannot show a million rows.
    metrics = RowFile(file)
    metrics.update()
    rows = metrics.thin.rows()
    if metrics.problem or not rows:
        empty = "its lines are not rows of metrics" if metrics.thin.count else "no step was logged"
        raise InputError(f"titan plot: {file}: {metrics.problem or empty}")
    return rows


def points(rows: list[Row], x: str, key: str) -> tuple[list[float], list[float]]:
    """Return x and y of the rows that have the key. Time is in hours."""
    x_key, unit = ("time_s", 3600) if x == "time" else (x, 1)
    pairs = ((number(row.get(x_key)), number(row.get(key))) for row in rows)
    known = [(a / unit, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def running_mean(values: list[float]) -> list[float]:
    """Return the mean over about a thirtieth of the curve around each point.

    The window is centred and shrinks towards both ends, so that the mean does not lag behind a falling loss.
    """
    sums = [0.0, *accumulate(values)]
    # Prefix sums make this linear for any window.
    half = len(values) // 60
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def draw(runs: dict[str, list[Row]], *, output: Path, x: str) -> None:
    """Draw the rows of runs, by their names in the legend."""
    from matplotlib.figure import Figure  # not pyplot: it would look for a display
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 7.5), layout="constrained", dpi=120)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, (name, rows) in enumerate(runs.items()):
        line: dict[str, Any] = {"color": f"C{i % 10}"}  # matplotlib's ten colours
        at, loss = points(rows, x, "loss")
        # Single steps are noisy: show them faintly, and the mean on top.
        upper.plot(at, loss, **line, linewidth=0.8, alpha=0.35)
        upper.plot(at, running_mean(loss), **line, linewidth=2, label=f"{name}: training")
        at, validation = points(rows, x, "validation_loss")
        if at:
            label = f"{name}: validation (last {validation[-1]:.4f})"
            marker: dict[str, Any] = {"markersize": 6, "markeredgecolor": "white"}
            upper.plot(at, validation, "o", **line, **marker, label=label)
        lower.plot(*points(rows, x, "tokens_per_s"), **line, linewidth=1.2)
    upper.set_ylabel("loss (nats per token)")
    lower.set_ylabel("tokens per second")
    lower.set_xlabel("hours since the first start" if x == "time" else x)
    # From zero, so that a small dip does not look like a collapse.
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
