"""One factory of jobs for every test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan.config.layout import AXES
from titan.config.schema import JobConfig

ROOT = Path(__file__).parents[2]
Sections = Mapping[str, Mapping[str, Any]]

# A few steps of two blocks of the tiny model on synthetic tokens, in fp32, with a row of metrics for each step.
SMALL: Sections = {
    "model": {"flavor": "tiny", "overrides": {"n_layers": 2}},
    "training": {
        "dataset": "synthetic",
        "seq_len": 32,
        "local_batch_size": 2,
        "steps": 2,
        "mixed_precision_param": "float32",
    },
    "lr_scheduler": {"warmup_steps": 1},
    "metrics": {"log_freq": 1},
}


DEGREES = {axis: key.partition(".")[2] for axis, key in AXES.items()}
DEGREES |= {"dp": DEGREES["dp_shard"], "ep": "expert_parallel_degree"}


def degrees_of(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the keys of [parallelism] of a layout, given the sizes of its axes."""
    return {DEGREES[axis]: size for axis, size in axes.items()}


def job(folder: Any = None, *, base: Any = SMALL, phase: Any = (), **changes: Any) -> JobConfig:
    """Return a config: `base`, with each section of `changes` merged into its section.

    Args:
        folder: becomes `job.dump_folder`.
        base: the sections to start from.
        phase: tables of phases.
        changes: sections.
    """
    sections = {name: dict(section) for name, section in base.items()}
    if folder is not None:
        sections["job"] = {"dump_folder": str(folder)}
    for name, change in changes.items():
        sections[name] = sections.get(name, {}) | dict(change)
    return JobConfig.model_validate(sections | ({"phase": [*phase]} if phase else {}))


def with_changes(base: Sections, **changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of `base` with those of `changes` merged in: another base for `job`."""
    names = [*base, *(name for name in changes if name not in base)]
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in names}
