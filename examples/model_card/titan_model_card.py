"""Write README.md, the hub's model card, beside the weights that `titan convert to-hf` exports.

It names paths of your data, so read it before you publish it. License, intended use and limits are yours to add.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.base.rows import read_rows
from titan.config.schema import JobConfig
from titan.config.task import reads_text
from titan.data.text import describe_sources

FIGURES = ("loss", "validation_loss", "bits_per_byte")


def write_card(
    output: Path,
    config: JobConfig,
    run: Path,
    *,
    what: str,
    saved: Mapping[str, Any],
    is_average: bool,
) -> None:
    """Write the card.

    Args:
        output: the exported folder.
        config: the job.
        run: the folder of the run, whose metrics.jsonl has the figures.
        what: architecture, size and precision.
        saved: step and tokens of the checkpoint. A step of 0 was converted, and not trained here.
        is_average: whether the weights are an average over the steps.
    """
    table: dict[str, Any] = {}
    if saved["step"]:
        table["steps"] = f"{saved['step']:,} of {config.training.steps:,}"
        table["sequence length"] = f"{config.training.seq_len:,}"
        if reads_text(config):
            table |= {"tokens": f"{saved['tokens']:,}", "data": describe_sources(config)}
        table["optimizer"] = (
            f"{config.optimizer.name}, peak learning rate {config.optimizer.lr:g}"
        )
        if is_average:
            table["weights"] = "an exponential moving average over the steps"
        table |= newest_figures(run / "metrics.jsonl", saved["step"])
    lines = ["---", "library_name: transformers", "tags:", "- titan", "---", ""]
    lines += [f"# {output.name}", "", f"{what}, written by titan.", ""]
    if table:
        rows = [f"| {name} | {value} |" for name, value in table.items()]
        lines += ["## Training", "", "| | |", "|---|---|", *rows, ""]
    (output / "README.md").write_text("\n".join(lines), encoding="utf-8")


def newest_figures(metrics: Path, step: int) -> dict[str, str]:
    """Return the newest losses and scores up to a step."""
    found: dict[str, str] = {}
    for row in read_rows(metrics) if metrics.exists() else ():
        for name, value in row.items():
            is_figure = name in FIGURES or name.startswith("eval/")
            if row["step"] <= step and is_figure and isinstance(value, float):
                found[name] = f"{value:.4f}"
    return found
