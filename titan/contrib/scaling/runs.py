"""Runs that a law is fitted to, from run folders or a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

from titan.base.untrusted import InputError, printable, read_text
from titan.config.load import load_config
from titan.config.permissions import without_permissions
from titan.config.schema import JobConfig
from titan.observe.rows import Row, number, read_rows
from titan.tools.row_files import runs_near

from .law import Law, Run

LEAST = len(Law._fields) + 1
_LONGEST = 1 << 17  # characters of a line
_COLUMNS = {
    "params": ("params", "n", "parameters"),
    "tokens": ("tokens", "d"),
    "loss": ("loss", "l"),
    "name": ("name", "run", "id"),
}


_LAST = 0.05  # share of a run's rows whose mean loss is its final loss


def final_loss(rows: list[Row]) -> float | None:
    """Return a run's last validation loss, or the mean of its last training losses; None if there is none."""
    validations = [x for row in rows if (x := number(row.get("validation_loss"))) is not None]
    if validations:
        return validations[-1]
    last = rows[-max(1, round(_LAST * len(rows))) :]
    losses = [x for row in last if (x := number(row.get("loss_mean"))) is not None]
    return sum(losses) / len(losses) if losses else None


def read(
    paths: Sequence[Path], *, total: bool = False, trust_remote_code: bool = False
) -> tuple[list[Run], dict[str, Any]]:
    """Read runs, sorted by their FLOPs, and what all of them were trained on.

    Args:
        paths: Run folders, folders of run folders, or one CSV file.
        total: Count all parameters of a model with experts, and not those of a token.
        trust_remote_code: Obey model.trust_remote_code of the runs' jobs.

    Raises:
        InputError: A file is wrong, or runs differ in text or tokenizer.
    """
    if len(paths) == 1 and paths[0].suffix.lower() == ".csv":
        runs, shared = _of_csv(paths[0]), {}
    else:
        folders = {folder.resolve() for path in paths for folder in folders_of(path)}
        granted = ["model.trust_remote_code"] * trust_remote_code
        found = [of_folder(folder, total=total, granted=granted) for folder in sorted(folders)]
        shared = require_shared([text_settings(config) for _, config, _ in found])
        runs = [run for run, _, _ in found]
    return sorted(runs, key=lambda run: run.flops), shared


def require_enough(runs: Sequence[Run], *, left_out: int = 0) -> None:
    """Raise InputError if a law cannot be fitted to runs."""
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    count += f" after --leave-out {left_out}" * bool(left_out)
    for field in ("params", "tokens"):
        if len({getattr(run, field) for run in runs}) < 3:
            raise InputError(
                f"{count}: fewer than three different numbers of {field}; the law needs three of each"
            )
    if len(runs) < LEAST:
        raise InputError(f"{count}: the law needs at least {LEAST}")


def is_line(runs: Sequence[Run]) -> bool:
    """Return whether tokens grow with parameters so evenly that the law's two terms cannot be told apart."""
    logs = ([math.log(getattr(run, field)) for run in runs] for field in ("params", "tokens"))
    return abs(correlation(*logs)) > 0.998  # below, intervals hold the truth in simulated fits


def folders_of(path: Path) -> list[Path]:
    """Return a run folder, or those in a folder of them."""
    if (path / "metrics.jsonl").is_file():
        return [path]
    if inside := sorted(file.parent for file in path.glob("*/metrics.jsonl")):
        return inside
    hint = runs_near(path, ["metrics.jsonl"])
    if path.is_file():
        raise InputError(f"{path}: expected run folders, or one file that ends in .csv")
    raise InputError(f"{path}: no run, and no folder of runs{hint}")


def of_folder(
    folder: Path, *, total: bool = False, granted: Sequence[str] = ()
) -> tuple[Run, JobConfig, list[Row]]:
    """Return a finished run, its job and its rows."""
    config = load_config(folder / "config.toml")
    obeyed, _ = without_permissions(config, run=folder, granted=granted)
    sizes = obeyed.model.sizes
    rows = [row for row in read_rows(folder / "metrics.jsonl") if number(row.get("tokens"))]
    # A run may have been stopped early on the schedule of a whole one.
    steps = max(config.training.steps, config.lr_scheduler.total_steps or 0)
    if not rows or rows[-1]["step"] < steps:
        done = rows[-1]["step"] if rows else 0
        raise InputError(
            f"{folder}: step {done} of {steps}: only finished runs have a final loss"
        )
    params = sizes.num_params if total else sizes.num_active_params
    if not (loss := final_loss(rows)):
        raise InputError(f"{folder}: its last rows have no loss: did it diverge?")
    return Run(folder.name, float(params), float(rows[-1]["tokens"]), loss), config, rows


def text_settings(config: JobConfig) -> dict[str, Any]:
    """Return the settings of a job that all runs must share, since losses on other text or tokens do not compare."""
    return {
        "training.seq_len": config.training.seq_len,
        "data.validation_fraction": config.data.validation_fraction,
        "training.dataset": config.training.dataset,
        "training.dataset_path": str(config.training.dataset_path or ""),
        "data.sources": [source.model_dump(mode="json") for source in config.data.sources],
        "tokenizer.name": config.tokenizer.name,
        "tokenizer.path": str(config.tokenizer.path or config.model.hf_assets_path or ""),
    }


def require_shared(settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of all runs, which must agree: losses on other text or tokens do not compare."""
    for key in settings[0] if settings else ():
        values = list(dict.fromkeys(str(each[key]) for each in settings))
        if len(values) > 1:
            shown = ", ".join(map(repr, values[:3]))
            raise InputError(f"runs differ in {key}: {shown:.300}: their losses do not compare")
    return settings[0] if settings else {}


def _of_csv(file: Path) -> list[Run]:
    """Return the runs of a CSV file with columns params (or N), tokens (or D), loss, and perhaps name."""
    lines = read_text(file).removeprefix("\ufeff").splitlines()
    # Fields end at the separator that the header has most of.
    separator = max(",;\t", key=lines[0].count) if lines else ","
    if max(map(len, lines), default=0) > _LONGEST:
        raise InputError(f"{file}: has a line of more than {_LONGEST:,} characters")
    reader = csv.reader(lines, delimiter=separator)
    header = [name.strip() for name in next(reader, [])]
    places: dict[str, int] = {}
    for field, known in _COLUMNS.items():
        found = [place for place, name in enumerate(header) if name.lower() in known]
        if len(found) > 1:
            several = " and ".join(header[place] for place in found)
            raise InputError(f"{file}: columns {several} mean the same: remove one")
        if found:
            places[field] = found[0]
        elif field != "name":
            has = ", ".join(header).lower() or "none"
            raise InputError(f"{file}: no column {field} ({' or '.join(known)}); it has {has}")
    runs = []
    for row in filter(None, reader):
        where = f"{file}:{reader.line_num}"
        if len(row) != len(header):
            raise InputError(
                f"{where}: has more or fewer fields than the header, which are separated by {separator!r}"
            )
        values = []
        for field in Run._fields[1:]:
            text = row[places[field]].strip()
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not (0 if field == "loss" else 1) <= value < 1e18 or not value:
                rule = "above zero" if field == "loss" else "from 1 to 1e18"
                raise InputError(f"{where}: {field} is {printable(text)}, not a number {rule}")
            values.append(value)
        params, tokens, _ = values
        if params < 1e4 or tokens < params / 10:
            raise InputError(
                f"{where}: {params:g} parameters and {tokens:g} tokens: are these millions and billions? Write 70e6 for 70 million"
            )
        name = row[places["name"]] if "name" in places else ""
        runs.append(Run(name or f"line {reader.line_num}", *values))
    return runs
