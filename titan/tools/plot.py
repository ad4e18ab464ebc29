"""Command `titan plot RUN... [--output FILE.png] [--x step|tokens|time]`: curves of runs in one picture.

The upper panel shows the loss: the losses of logged steps (faint), the mean since the last row
(thin), its running mean (bold), and validations as markers. The lower panel shows the throughput.
Between them are the losses of a blend's sources, bits per byte, the accuracy of evaluated tasks, and of sparse attention the
indexer's loss, the recall of each layer (thin, with the layer's number at the beginning) and their mean. Vertical lines mark where a run
continued from a checkpoint, after a restart (dashed) or a rewind (dotted), or as another job
(`titan swap`, dash-dotted). The command reads metrics.jsonl, which rows.py thins if it is long, and
events.jsonl. It needs the extra `plot` (matplotlib).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from titan.base.rows import Row, number, read_rows
from titan.base.run_folder import EVENTS, METRICS, RunFolder
from titan.base.untrusted import InputError
from titan.config.options import mistake
from titan.config.toml import table_beside
from titan.observe.sinks import require

from .row_files import RowFile, run_names
from .tables import parser_of

Style = dict[str, Any]
TABLE = table_beside(__file__, "plot.toml")
MARKS = TABLE["marks"]
MEAN, LAYER = "mean recall", "recall of layer "


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: a run or the output is wrong. titan.cli reports it.
    """
    arguments = parser_of("plot").parse_args(argv)
    kind = arguments.output.suffix.lower() if arguments.output else ".png"
    if kind not in (".png", ".pdf", ".svg"):
        raise mistake("--output", f"{arguments.output}: end it in .png, .pdf or .svg")
    require("matplotlib", extra="plot", asked_by="titan plot")
    folders = RunFolder.find(arguments.runs)
    files = [run if run.is_file() else run / METRICS for run in folders]
    runs = dict(zip(run_names(folders), map(read_metrics, files), strict=True))
    starts = [read_starts(file.parent) for file in files]
    output = arguments.output or files[0].with_name("curves.png")
    if not arguments.output and output.is_symlink():
        output.unlink()  # rather than write to where the author of the folder points
    from matplotlib import rc_context

    try:
        with rc_context(TABLE["matplotlib"]):
            draw(runs, starts, output=output, x=arguments.x)
    except OSError as error:
        raise InputError(str(error)) from None
    print(f"wrote {output}")
    return 0


def read_metrics(file: Path) -> list[Row]:
    """Read the rows of a metrics.jsonl, thinned.

    Raises:
        InputError: there are no rows.
    """
    if not file.is_file():
        hint = RunFolder.near(file.parent, METRICS)
        raise InputError(f"{file}: no such file, so not the folder of a run{hint}")
    # Thinned: a picture of a thousand pixels cannot show a million rows.
    metrics = RowFile(file)
    metrics.update()
    rows = [with_recall(row) for row in metrics.thin.rows()]
    for row in rows:
        if (seconds := number(row.get("time_s"))) is not None:
            row["time"] = seconds / 3600
    if metrics.problem or not rows:
        empty = (
            "its lines are not rows of metrics" if file.stat().st_size else "no step was logged"
        )
        raise InputError(f"{file}: {metrics.problem or empty}")
    return rows


def read_starts(run: Path) -> list[Row]:
    """Read the events after which a run continued from a checkpoint. A missing file has none."""
    with suppress(InputError):
        return [row for row in read_rows(run / EVENTS) if str(row.get("event")) in MARKS]
    return []


def mark(start: Row, rows: list[Row], x: str) -> float | None:
    """Return the place on the horizontal axis where a run continued.

    Args:
        start: event after which the run continued.
        rows: rows of metrics.
        x: "step", "tokens" or "time".

    Returns:
        The place, or None if the rows do not determine it.
    """
    step = number(start.get("step"))
    if step is None or x == "step":
        return step
    from numpy import interp  # cheap next to matplotlib

    # Between two rows it grows evenly, and before the first one from zero.
    steps, places = points(rows, "step", x)
    return float(interp(step, [0.0, *steps], [0.0, *places]))


def points(rows: list[Row], x: str, key: str) -> tuple[list[float], list[float]]:
    """Return x and y of the rows that have both.

    Args:
        rows: rows of metrics.
        x: "step", "tokens" or "time".
        key: column of y, or "time", in hours.
    """
    pairs = ((number(row.get(x)), number(row.get(key))) for row in rows)
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def loss_curves(rows: list[Row], x: str) -> list[tuple[str, Style, list[float], list[float]]]:
    """Return name, style, x and y of each curve of the training loss; the last curve is bold."""
    single, mean = points(rows, x, "loss"), points(rows, x, "loss_mean")
    # Rows of a version without means have only the losses.
    at, loss = mean if mean[1] else single
    curves = single, mean, (at, running_mean(loss))
    named = zip(TABLE["curves"].items(), curves, strict=True)
    return [(name, style, x, y) for (name, style), (x, y) in named if y]


def running_mean(values: list[float]) -> list[float]:
    """Return the mean over about a thirtieth of the curve around each point.

    The window is centred and shrinks towards both ends, so that the mean does not lag behind a
    falling loss.
    """
    import numpy as np  # cheap next to matplotlib

    # Prefix sums make this linear for any window.
    sums = np.cumsum([0.0, *values])
    places = np.arange(len(values))
    reach = np.minimum(np.minimum(places, places[::-1]), len(values) // 60)
    means = (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)
    return [*means]


def panels(runs: dict[str, list[Row]]) -> Iterator[tuple[str, list[str]]]:
    """Yield label and columns of each panel between loss and throughput, if a row has these columns."""
    keys = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    for label, names in TABLE["panels"].items():
        if found := [key for key in keys if re.fullmatch(names, key)]:
            yield label, found


def with_recall(row: Row) -> Row:
    """Return a row with the recall of each layer's choice, and their mean, as columns."""
    try:
        pairs = [*zip(row["indexer"]["layer"], row["indexer"]["recall"], strict=False)]
    except (KeyError, TypeError):
        return row
    recalls = {f"{LAYER}{layer}": r for layer, r in pairs if number(r) is not None}
    return row | ({MEAN: fmean(recalls.values())} if recalls else {}) | recalls


def draw(runs: dict[str, list[Row]], starts: list[list[Row]], *, output: Path, x: str) -> None:
    """Draw the rows of runs, and the places where each run continued.

    Args:
        runs: rows of each run, by its name in the legend.
        starts: events of each run after which it continued.
        output: file of the picture.
        x: "step", "tokens" or "time".
    """
    from matplotlib.figure import Figure  # not pyplot: it would look for a display
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    more = dict(panels(runs))
    heights = (2, *(1 for _ in more), 1)
    figure = Figure(figsize=(10, 2.5 * sum(heights)))
    upper, *between, lower = all_axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    styles = {}  # styles of the drawn lines, by their names in the legend
    for i, (name, rows) in enumerate(runs.items()):
        line = {"color": f"C{i % 10}"}  # matplotlib's ten colours
        # A few rows are dots: lines between them would look like a curve that nobody measured.
        dash = "." if len(rows) < 10 else "-"
        for text, style, at, loss in loss_curves(rows, x):
            # The run's name belongs to the last curve, which is bold.
            label = name if text == "running mean" else None
            upper.plot(at, loss, dash, **line, **style, label=label)
            styles[text] = style
        at, validation = points(rows, x, "validation_loss")
        if at:
            label = f"{name}: validation (last {validation[-1]:.4f})"
            upper.plot(at, validation, **line, **TABLE["styles"]["validation"], label=label)
        lower.plot(*points(rows, x, "tokens_per_s"), dash, **line, linewidth=1.2)
        for axes, keys in zip(between, more.values(), strict=True):
            for key, dash in zip(keys, cycle(("-", "--", ":", "-."))):
                at, values = points(rows, x, key)
                if not at:
                    continue
                if key.startswith(LAYER):  # its number is at the beginning of the line
                    axes.plot(at, values, **line, **TABLE["styles"]["layer"])
                    layer = key.removeprefix(LAYER)
                    axes.annotate(layer, (at[0], values[0]), ha="right", fontsize=7, **line)
                    continue
                label = f"{name}: {key} (last {values[-1]:.4f})"
                axes.plot(at, values, dash, **line, **TABLE["styles"]["column"], label=label)
        for start in starts[i]:
            style = {**MARKS[start["event"]]}
            text = style.pop("label")
            if (place := mark(start, rows, x)) is not None:
                styles[text] = style
                for axes in all_axes:
                    axes.axvline(place, **line, **style)
    for axes, text in zip(
        all_axes, ("loss (nats per token)", *more, "tokens per second"), strict=True
    ):
        axes.set_ylabel(text)
    for axes in between:
        axes.legend()
    lower.set_xlabel("hours since the first start" if x == "time" else x)
    # From zero, so that a small dip does not look like a collapse.
    lower.set_ylim(bottom=0)
    for axis in (lower.yaxis, *(() if x == "time" else (lower.xaxis,))):
        axis.set_major_formatter(EngFormatter(sep=""))
    # Styles have the same meaning in every run, so the legend explains them once, in grey.
    grey = [Line2D([], [], color="grey", **style, label=text) for text, style in styles.items()]
    upper.legend(handles=[*upper.get_legend_handles_labels()[0], *grey])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
