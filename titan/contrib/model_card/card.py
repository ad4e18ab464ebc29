"""Model card (README.md) of an exported model, with the facts that titan has about its training. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import titan
from titan.config.schema import JobConfig
from titan.config.task import reads_text
from titan.data.text import describe_sources
from titan.observe.rows import read_rows
from titan.untrusted import InputError, printable

_FIGURES = ("loss", "validation_loss", "bits_per_byte")


def model_card(
    config: JobConfig,
    what: str,
    *,
    name: str,
    saved: Mapping[str, Any],
    row: Mapping[str, Any],
    is_average: bool,
) -> str:
    """Return the model card.

    Args:
        config: The job.
        what: Architecture, size and precision.
        name: Name of the model.
        saved: Metadata of the checkpoint, of which step and tokens are used.
        row: Newest row of metrics.jsonl up to that step, or {}.
        is_average: Whether the weights are an average over the run's steps.
    """
    training, optimizer = config.training, config.optimizer
    facts = {
        "steps": f"{saved['step']:,} of {training.steps:,}",
        "tokens": f"{saved['tokens']:,}" if reads_text(config) else "",
        "sequence length": f"{training.seq_len:,}",
        "data": printable(describe_sources(config)) if reads_text(config) else "",
        "optimizer": f"{optimizer.name}, peak learning rate {optimizer.lr:g}",
        "weights": "an exponential moving average over the steps" if is_average else "",
    }
    figures = {
        key: f"{value:.4f}"
        for key, value in row.items()
        if (key in _FIGURES or key.startswith("eval/")) and isinstance(value, float)
    }
    # A checkpoint at step 0 was converted and has not been trained here.
    tables = (
        [("Training", facts), (f"Figures of step {row.get('step', 0):,}", figures)]
        if saved["step"]
        else []
    )
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- titan",
        "---",
        "",
        f"# {printable(name)}",
        "",
    ]
    lines += [f"{what}, written by titan {titan.__version__}.", ""]
    for title, table in tables:
        rows = [f"| {key} | {value} |" for key, value in table.items() if value]
        lines += [f"## {title}", "", "| | |", "|---|---|", *rows, ""] if rows else []
    return (
        "\n".join([*lines, "Add what titan cannot know: the license, intended use, and limits."])
        + "\n"
    )


def write_card(output: Path, config: JobConfig, run: Path, **about: Any) -> None:
    """Write README.md into an exported folder: the extension of `titan convert`.

    Args:
        output: The exported folder.
        config: The job.
        run: Folder of the run with metrics.jsonl.
        **about: `what`, `saved` and `is_average` of `model_card`.
    """
    row = newest_row(run, about["saved"]["step"])
    card = model_card(config, name=output.name, row=row, **about)
    (output / "README.md").write_text(card, encoding="utf-8")


def newest_row(run: Path, step: int) -> Mapping[str, Any]:
    """Return the newest value of each column of a run's metrics.

    Args:
        run: Folder of the run.
        step: Last step to read.

    Returns:
        Values by column, or {} for a run without metrics.
    """
    try:
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= step]
    except InputError:
        return {}
    found: dict[str, Any] = {}
    for row in rows:
        found |= {key: value for key, value in row.items() if value is not None}
    return found
