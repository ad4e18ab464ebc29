"""The two sides of `titan compare`: their runs, and in which column of the rows their losses compare.

A run that diverged or is not finished has no part in a mean, and is counted. Speeds compare if all runs had the same machine, and the
runs of a side the same number of ranks: the layout is part of a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.base.rows import Row, number
from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError
from titan.checkpoint.identity import job_facts
from titan.config.layout import layout_of
from titan.config.load import load_config
from titan.config.phases import phases_of
from titan.config.schema import JobConfig
from titan.tools.plot import points

from . import runs as reading
from .paired import Curve

_UNKNOWN = "an unknown machine"
_TOKENS = "tokens (steps x batch)"
# Keys in which runs of one recipe may differ. Others tell the text of these paths.
_OWN: Any = {
    "job": True,
    "debug": {"seed"},
    "training": {"dataset_path"},
    "validation": {"dataset_path"},
    "data": {"sources"},
    "tokenizer": {"path", "chat_template"},
    "model": {"hf_assets_path"},
}
# Settings of a model that change its loss while it trains, and not in validation.
_NOISE = re.compile("drop|jitter|noise")


@dataclass(frozen=True)
class SeedRun:
    """A run of a side.

    Attributes:
        folder: folder of the run.
        config: job of the run.
        rows: rows of its metrics.jsonl.
        state: "done", "diverged", or "did not finish".
        machine: devices and host of the run.
        ranks: number of ranks.
    """

    folder: Path
    config: JobConfig
    rows: list[Row]
    state: str
    machine: str
    ranks: int

    @staticmethod
    def of(folder: Path, *, is_own: bool) -> SeedRun:
        """Read the run of a folder, whatever became of it. Only an own run says which code may run."""
        run = RunFolder(folder)
        config = load_config(run.config)
        if not is_own:
            model = config.model.model_copy(update={"trust_remote_code": False})
            config = config.model_copy(update={"model": model})
        rows = [row for row in run.rows() if number(row.get("tokens"))]
        step = rows[-1]["step"] if rows else 0
        # It may have been stopped early on the schedule of a longer run.
        steps = max(config.training.steps, config.lr_scheduler.total_steps or 0)
        state = "done" if step >= steps else "did not finish"
        is_lost = state == "done" and reading.final_loss(rows) is None
        if is_lost or run.status.kind == "loss_not_finite":
            state = "diverged"
        try:
            facts = run.facts(dict)
            devices = ", ".join(sorted({*facts["device_names"]}))
            machine = f"{devices} of {facts['hostname']}"
        except (InputError, LookupError, TypeError):
            facts, machine = {}, _UNKNOWN
        return SeedRun(folder, config, rows, state, machine, int(facts.get("world_size") or 1))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the runs of a side share: the job without the seed and paths, the text, and the number of tokens."""
        tokens = sum(phase.tokens for phase in phases_of(self.config, world_size=self.ranks))
        text = reading.text_settings(self.config) | reading.text_of_validation(self.config)
        return self.config.model_dump(exclude=_OWN) | text | {_TOKENS: tokens}

    @property
    def decays(self) -> bool:
        """Return whether the learning rate at the end is below its largest."""
        rates = [rate for row in self.rows if (rate := number(row.get("lr"))) is not None]
        return bool(rates) and rates[-1] < 0.95 * max(rates)


@dataclass(frozen=True)
class Recipe:
    """A recipe: runs of one job with several seeds.

    Attributes:
        name: "A" or "B".
        runs: the runs by their seed.
    """

    name: str
    runs: dict[int, SeedRun]

    @staticmethod
    def read(name: str, path: Path, *, is_own: bool) -> Recipe:
        """Read a run folder, or a folder of them.

        Raises:
            InputError: There is none, or they are not of one job with a seed each.
        """
        runs: dict[int, SeedRun] = {}
        for folder in reading.folders_of(path):
            entry = SeedRun.of(folder, is_own=is_own)
            other = runs.setdefault(entry.config.debug.seed, entry)
            if other is not entry:
                raise InputError(f"{other.folder} and {entry.folder} have the same debug.seed")
        reading.require_shared([run.settings for run in runs.values()])
        return Recipe(name, runs)

    @property
    def first(self) -> SeedRun:
        """Return the run of the smallest seed."""
        return self.runs[min(self.runs)]

    @property
    def done(self) -> dict[int, SeedRun]:
        """Return the runs with a final loss."""
        return {seed: run for seed, run in self.runs.items() if run.state == "done"}

    def curve(self, seed: int, key: str) -> Curve:
        """Return a column of a run over its tokens."""
        return points(self.runs[seed].rows, "tokens", key)


def measure_of(configs: Sequence[JobConfig], ranks: Sequence[int]) -> tuple[str, str, str, str]:
    """Return how the losses of two jobs compare: by the validations of both, or else by their training losses.

    Returns:
        Unit of a loss, column over tokens that has the slope, column of the final loss, and a note for the reader.

    Raises:
        InputError: They do not.
    """
    shared = []
    for config, count in zip(configs, ranks, strict=True):
        text = reading.text_settings(config)
        text["task.name"] = config.task.name
        text[_TOKENS] = sum(p.tokens for p in phases_of(config, world_size=count))
        shared.append(text)
    names = ("tokenizer", "tokenizer.chat_template")
    first, second = ([settings.pop(name) for name in names] for settings in shared)
    is_one = first == second
    reading.require_shared(shared)
    other = _difference(*map(_of_training, configs))
    why = "validation.enable is not set in both"
    if all(config.validation.enable for config in configs):
        why = _difference(*map(_of_validation, configs, ranks))
        if not is_one and configs[0].validation.steps != -1:
            why = "validations of other tokens need validation.steps = -1, the whole text"
    if not is_one:
        other = "tokenizer or chat template"
    if why and other:
        raise InputError(
            f"A and B differ in {other}: their training losses do not compare, and {why}"
        )
    if why:
        return "nats", "loss_mean", "loss_mean", f"loss: of training, since {why}"
    note = "loss: of validations"
    if not is_one:
        return "bits a byte", "bits_per_byte", "bits_per_byte", note
    if not other:
        return "nats", "loss_mean", "validation_loss", note
    note += f", each in its own way: A and B differ in {other}"
    return "nats", "validation_loss", "validation_loss", note


def _of_training(config: JobConfig) -> dict[str, Any]:
    """Return the settings that decide what a training loss is the mean of, but for the text."""
    keys = ("packing", "document_mask", "add_bos", "add_eos")
    noise = {
        key: value for key, value in job_facts(config).items() if value and _NOISE.search(key)
    }
    loss = {"loss.name": config.loss.name, "loss.options": config.loss.options}
    return loss | {f"data.{key}": getattr(config.data, key) for key in keys} | noise


def _of_validation(config: JobConfig, ranks: int) -> dict[str, Any]:
    """Return the settings that decide what is validated on."""
    section, found = config.validation, reading.text_of_validation(config)
    # -1: the whole text.
    of_all = section.local_batch_size * layout_of(config, ranks).dp
    sequences = max(-1, section.steps * of_all)
    return found | {"validation.steps (sequences of all ranks)": sequences}


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return the first key in which two jobs differ, with its values, or ""."""
    keys = (key for key in a | b if a.get(key) != b.get(key))
    return next((f"{key} ({a.get(key)!s:.60} and {b.get(key)!s:.60})" for key in keys), "")


def why_speeds_differ(a: Recipe, b: Recipe, seeds: Sequence[int]) -> str:
    """Return why the times of two sides' runs do not compare, or "" if they do."""
    places: dict[str, str] = {}
    for side in (a, b):
        runs = [side.runs[seed] for seed in seeds]
        if len({run.ranks for run in runs}) > 1:
            return f"runs of {side.name} had different numbers of ranks"
        for seed, run in zip(seeds, runs, strict=True):
            places.setdefault(run.machine, f"{side.name}'s seed {seed} on {run.machine}")
    is_known = len(places) == 1 and _UNKNOWN not in places
    return "" if is_known else "; ".join([*places.values()][:3])
