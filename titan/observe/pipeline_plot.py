"""`titan pipeline JOB.toml [--world-size N] [--microbatches M] [--output FILE.png] [--csv FILE.csv]`: a job's pipeline schedule,
drawn, and what it costs.

Ranks downwards, time to the right, in units of a forward pass of one microbatch through one stage; a whole backward
pass takes two. Nothing is run or measured: the order is the one that training follows, and each action starts as soon as it
can. Needs the extra `plot` (matplotlib) for the picture only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from math import prod
from pathlib import Path
from typing import Any

from titan.config.errors import ConfigError
from titan.config.layout import AXES, check_layout, stage_split
from titan.config.load import load_from_argv
from titan.config.model import model_config
from titan.observe.sinks import MissingExtra, require
from titan.parallel.schedules import Schedule, Span, write_schedule
from titan.parallel.stage_split import StageSplit

OPTIONS = ("--world-size", "--microbatches", "--output", "--csv")
KINDS = {
    "F": ("forward", "#4477aa"),
    "B": ("backward", "#228833"),
    "I": ("backward, input", "#66aa55"),
    "W": ("backward, weights", "#cc8833"),
}
IDLE = "#ececec"


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes, but that titan.cli tells a `ConfigError`."""
    parser = argparse.ArgumentParser(
        prog="titan pipeline",
        usage="titan pipeline JOB.toml [OVERLAY.toml ...] [--section.key=value ...] [--world-size N] "
        "[--microbatches M] [--output FILE.png] [--csv FILE.csv]",
        description="Draw a job's pipeline schedule; say its idle time and its activations in flight.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="default: the least that fits")
    parser.add_argument("--microbatches", type=int, metavar="M", help="default: the job's")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="also draw a picture")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="also write it as a CSV")
    options, job = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    plan = _plan(job, world_size=options.world_size, num_microbatches=options.microbatches)
    print(describe(plan, columns=shutil.get_terminal_size((120, 24)).columns))
    try:
        if options.output:
            require("matplotlib", extra="plot", asked_by="titan pipeline --output")
            draw(plan.schedule, output=options.output)
        if options.csv:
            write_schedule(plan.schedule, options.csv)
    except (MissingExtra, OSError) as error:
        print(f"titan pipeline: {error}", file=sys.stderr)
        return 2
    for file in filter(None, (options.output, options.csv)):
        print(f"wrote {file}")
    return 0


def _plan(argv: list[str], *, world_size: int | None, num_microbatches: int | None) -> StageSplit:
    """Return the stages of a job. Raises ConfigError."""
    config = load_from_argv(argv, options=OPTIONS)
    parallel, key = config.parallelism, "parallelism.pipeline_parallel_degree"
    if parallel.pipeline_parallel_degree == 1:
        raise ConfigError([config.source_map.problem(key, "1 is no pipeline; set it to 2 or more")])
    if num_microbatches is not None:
        size = num_microbatches * parallel.pipeline_parallel_microbatch_size
        batch = [f"--training.local_batch_size={size}", "--training.global_batch_size=-1"]
        config = load_from_argv([*argv, *batch], options=OPTIONS)
    if world_size is None:
        degrees = (getattr(parallel, axis_key.rpartition(".")[2]) for axis_key in AXES.values())
        world_size = prod(max(1, degree) for degree in degrees)
    if problems := check_layout(config, world_size=world_size):
        raise ConfigError(problems)
    try:
        return stage_split(config, num_layers=model_config(config.model).n_layers)
    except (ValueError, OSError) as error:
        raise ConfigError([config.source_map.problem(key, str(error))]) from None


def describe(plan: StageSplit, *, columns: int) -> str:
    """The page that the command prints."""
    schedule = plan.schedule
    rows = [title(schedule), ""]
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        held = "; ".join(f"stage {s}: {_short(plan.modules[s])}" for s in stages)
        rows.append(f"rank {rank}  at most {schedule.peak_in_flight(rank)} in flight  {held}")
    note = (
        "in flight: microbatches whose activations are held, each stage of a rank counted by itself"
    )
    return "\n".join([*rows, note, "", *_timetable(schedule, columns=columns)])


def title(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, bubble {schedule.bubble_fraction():.1%}"
    )


def _short(names: list[str]) -> str:
    """Names of modules, consecutive layers as a range."""
    layers = [name for name in names if name.startswith("layers.")]
    if len(layers) < 3:
        return ", ".join(names)
    span = f"{layers[0]} to {layers[-1].rpartition('.')[2]}"
    shown = [span if name == layers[0] else name for name in names if name not in layers[1:]]
    return ", ".join(shown)


def _timetable(schedule: Schedule, *, columns: int) -> list[str]:
    """Actions over time as text, in as many blocks as the width of the terminal asks for."""
    timeline = schedule.timeline()
    cell = 1 + max(len(str(span.action)) for spans in timeline for span in spans)
    length = max(spans[-1].end for spans in timeline)
    label = f"rank {schedule.num_ranks - 1} "
    step = max(1, (columns - len(label)) // cell)
    lines = []
    for spans in timeline:
        cells = ["·"] * length
        for action, start, end in spans:
            cells[start:end] = [str(action)] + ["-"] * (end - start - 1)
        lines.append("".join(text.ljust(cell, "-" if text == "-" else " ") for text in cells))
    blocks = []
    for start in range(0, length, step):
        part = slice(start * cell, (start + step) * cell)
        rows = [f"{f'rank {rank}':{len(label)}}{line[part]}" for rank, line in enumerate(lines)]
        blocks += [f"time {start}", *(row.rstrip() for row in rows), ""]
    return blocks[:-1]


def draw(schedule: Schedule, *, output: Path) -> None:
    """Draw the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = schedule.timeline()
    length = max(spans[-1].end for spans in timeline)
    width = min(30.0, max(8.0, 0.24 * length))
    figure = Figure(figsize=(width, 1.6 + 0.5 * len(timeline)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, spans in enumerate(timeline):
        axes.barh(rank, length, height=0.9, color=IDLE, edgecolor="none")
        _draw_rank(axes, spans, rank=rank, stages=schedule.stages_of(rank), unit=width / length)
        peak = schedule.peak_in_flight(rank)
        axes.text(length, rank, f"  {peak} in flight", va="center", fontsize=8)
    axes.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    axes.set(
        xlim=(0, length),
        ylim=(len(timeline) - 0.5, -0.5),
        xlabel="time (forward passes of a stage)",
    )
    axes.set_title(title(schedule), loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    used = {span.action.kind for spans in timeline for span in spans}
    patches = [Patch(color=colour, label=what) for k, (what, colour) in KINDS.items() if k in used]
    patches.append(Patch(color=IDLE, label="bubble"))
    later = " (lighter: later stage)" if schedule.num_stages > schedule.num_ranks else ""
    figure.legend(
        handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8,
        title=f"number: microbatch{later}", title_fontsize=8, alignment="left",
    )  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")


def _draw_rank(axes: Any, spans: list[Span], *, rank: int, stages: list[int], unit: float) -> None:
    """unit: inches for a unit of time; numbers are left out where they would not fit."""
    from matplotlib.colors import to_rgb

    for stage, kind in sorted({(span.action.stage, span.action.kind) for span in spans}):
        light = 0.55 * stages.index(stage) / max(1, len(stages) - 1)
        colour = [part + (1 - part) * light for part in to_rgb(KINDS[kind][1])]
        same = [s for s in spans if (s.action.stage, s.action.kind) == (stage, kind)]
        bars = [(start, end - start) for _, start, end in same]
        axes.broken_barh(bars, (rank - 0.45, 0.9), color=colour, edgecolor="white", linewidth=0.5)
        for action, start, end in same if unit > 0.1 else ():
            axes.text(
                (start + end) / 2, rank, str(action.microbatch), ha="center", va="center",
                fontsize=min(8.0, 40 * unit), color="black" if light > 0.3 else "white",
            )  # fmt: skip
