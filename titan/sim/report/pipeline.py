"""Picture of a job's pipeline schedule, as text: `titan sim JOB.toml --pipeline`.

Ranks go down, time goes to the right, in units of a forward pass of one microbatch through one
stage. A whole backward pass takes two units. Nothing runs or is measured: the order is that of
training, and each action starts as soon as it can. `titan sim --trace` shows the same with
simulated durations.
"""

from __future__ import annotations

import csv
import shutil
from argparse import Namespace
from collections.abc import Sequence
from math import prod
from pathlib import Path

from titan.checks.layout_rules import check_layout
from titan.config.errors import ConfigError
from titan.config.layout import AXES, stage_split
from titan.config.load import load_from_argv
from titan.parallel.schedules import Schedule
from titan.parallel.stage_split import StageSplit


def draw(options: Namespace, job: list[str], *, known: Sequence[str]) -> int:
    """Print the picture, and write the schedule as a CSV where --csv asks for it. titan.cli reports a `ConfigError`.

    Args:
        options: options of `titan sim`.
        job: files and overrides.
        known: names of all options, for the error of a misspelled one.
    """
    split = _split(job, options, known)
    print(describe(split, columns=shutil.get_terminal_size((120, 24)).columns))
    if options.csv:
        write_schedule(split.schedule, options.csv)
        print(f"wrote {options.csv}")
    return 0


def _split(argv: list[str], options: Namespace, known: Sequence[str]) -> StageSplit:
    """Return the stages of a job.

    Raises:
        ConfigError: the job is wrong, or has no pipeline.
    """
    world_size, num_microbatches = options.world_size, options.microbatches
    config = load_from_argv(argv, options=known)
    parallel, key = config.parallelism, "parallelism.pipeline_parallel_degree"
    if parallel.pipeline_parallel_degree == 1:
        raise ConfigError(
            [config.source_map.problem(key, "1 is no pipeline; set it to 2 or more")]
        )
    if num_microbatches is not None:
        # As overrides, so that an error in the result names them.
        size = num_microbatches * parallel.pipeline_parallel_microbatch_size
        batch = [f"--training.local_batch_size={size}", "--training.global_batch_size=-1"]
        config = load_from_argv([*argv, *batch], options=known)
    # A degree of -1 takes all remaining ranks, at least one.
    if world_size is None:
        degrees = (getattr(parallel, axis_key.rpartition(".")[2]) for axis_key in AXES.values())
        world_size = prod(max(1, degree) for degree in degrees)
    if problems := check_layout(config, world_size=world_size):
        raise ConfigError(problems)
    try:
        return stage_split(config, num_layers=config.model.sizes.n_layers)
    except (ValueError, OSError) as error:
        raise ConfigError([config.source_map.problem(key, str(error))]) from None


def describe(split: StageSplit, *, columns: int) -> str:
    """Format the schedule as the command's page.

    Args:
        split: stages and schedule.
        columns: width of the terminal.
    """
    schedule = split.schedule
    rows = [
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, bubble {schedule.bubble_fraction():.1%}",
        "",
    ]
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        held = "; ".join(f"stage {s}: {_short(split.modules[s])}" for s in stages)
        rows.append(f"rank {rank}  at most {schedule.peak_in_flight(rank)} in flight  {held}")
    note = (
        "in flight: microbatches whose activations are held, counted for each stage of a rank"
    )
    return "\n".join([*rows, note, "", *_timetable(schedule, columns=columns)])


def _short(names: list[str]) -> str:
    """Join names of modules, with consecutive layers as a range."""
    layers = [name for name in names if name.startswith("layers.")]
    if len(layers) < 3:
        return ", ".join(names)
    span = f"{layers[0]} to {layers[-1].rpartition('.')[2]}"
    return ", ".join(
        [span if name == layers[0] else name for name in names if name not in layers[1:]]
    )


def _timetable(schedule: Schedule, *, columns: int) -> list[str]:
    """Draw actions over time, in as many blocks as the width of the terminal needs."""
    timeline = schedule.timeline()
    cell = 1 + max(len(str(span.action)) for spans in timeline for span in spans)
    length = max(spans[-1].end for spans in timeline)
    label = f"rank {schedule.num_ranks - 1} "
    # Number of units of time that fit beside the label, with `cell` characters each.
    step = max(1, (columns - len(label)) // cell)
    lines = []
    for spans in timeline:
        # One cell for each unit of time. Dashes follow an action that takes two units.
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


def write_schedule(schedule: Schedule, file: Path | str) -> None:
    """Write a schedule as a CSV that `read_schedule` (and torch) reads, as a start for a custom schedule."""
    with Path(file).open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(schedule.order)
