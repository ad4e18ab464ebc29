"""The two sides of `titan compare`: their runs, and in which column of the rows their losses compare.

A run that diverged or is not finished has no part in a mean, and is counted. Speeds compare if all runs had the same machine, and the
runs of a side the same number of ranks: the layout is part of a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan.base.run_folder import read_status
from titan.base.untrusted import InputError, read_json
from titan.checkpoint.identity import job_facts
from titan.config.load import load_config
from titan.config.phases import layout_of, phases_of
from titan.config.schema import JobConfig
from titan.observe.rows import Row, number, read_rows

from . import runs as reading

# Settings of a model that change its loss while it trains, and not in validation.
_TOKENS = "tokens (steps x batch)"
_NOISE = re.compile("drop|jitter|noise")


@dataclass(frozen=True)
class Entry:
    """A run of a side.

    Attributes:
        folder: Folder of the run.
        config: Job of the run.
        rows: Rows of its metrics.jsonl.
        state: "done", "diverged", or "not finished".
        machine: Devices and host of the run; empty if they are not known.
        ranks: Number of ranks.
    """

    folder: Path
    config: JobConfig
    rows: list[Row]
    state: str
    machine: str
    ranks: int

    @staticmethod
    def of(folder: Path) -> Entry:
        """Read the run of a folder, whatever became of it."""
        config = load_config(folder / "config.toml")
        file = folder / "metrics.jsonl"
        rows = (
            [row for row in read_rows(file) if number(row.get("tokens"))]
            if file.exists()
            else []
        )
        step = rows[-1]["step"] if rows else 0
        state = "done" if step >= reading.steps_of(config) else "not finished"
        is_lost = state == "done" and reading.final_loss(rows) is None
        if is_lost or read_status(folder).get("kind") == "loss_not_finite":
            state = "diverged"
        try:
            facts = read_json(folder / "environment.json", dict)
            devices = ", ".join(sorted({*facts["device_names"]}))
            machine = f"{devices} of {facts['hostname']}"
        except (InputError, LookupError, TypeError):
            facts, machine = {}, ""
        return Entry(folder, config, rows, state, machine, int(facts.get("world_size") or 1))

    @property
    def tokens(self) -> int:
        """Return the tokens of the whole run."""
        return sum(phase.tokens for phase in phases_of(self.config, world_size=self.ranks))

    @property
    def decays(self) -> bool:
        """Return whether the learning rate at the end is below its largest."""
        rates = [rate for row in self.rows if (rate := number(row.get("lr"))) is not None]
        return bool(rates) and rates[-1] < 0.95 * max(rates)


@dataclass(frozen=True)
class Side:
    """A recipe: runs of one job with several seeds.

    Attributes:
        name: "A" or "B".
        runs: The runs by their seed.
    """

    name: str
    runs: dict[int, Entry]

    @staticmethod
    def read(name: str, path: Path) -> Side:
        """Read a run folder, or a folder of them.

        Raises:
            InputError: There is none, or they are not of one job with a seed each.
        """
        folders = sorted(file.parent for file in path.glob("*/config.toml"))
        if (path / "config.toml").is_file() or not folders:
            folders = reading.folders_of(path)
        runs: dict[int, Entry] = {}
        for entry in map(Entry.of, folders):
            other = runs.setdefault(entry.config.debug.seed, entry)
            if other is not entry:
                raise InputError(f"{other.folder} and {entry.folder} have the same debug.seed")
        seed = {"job": True, "debug": {"seed"}}
        reading.require_shared(
            [e.config.model_dump(exclude=seed) | {_TOKENS: e.tokens} for e in runs.values()]
        )
        return Side(name, runs)

    @property
    def first(self) -> Entry:
        """Return the run of the smallest seed."""
        return self.runs[min(self.runs)]

    @property
    def done(self) -> dict[int, Entry]:
        """Return the runs with a final loss."""
        return {seed: run for seed, run in self.runs.items() if run.state == "done"}

    def count(self, state: str) -> int:
        """Return the number of runs in a state."""
        return sum(run.state == state for run in self.runs.values())


class Measure(NamedTuple):
    """How two sides' losses compare.

    Attributes:
        unit: Unit of a loss.
        curve: Column over tokens, which is drawn and has the slope.
        last: Column of the final loss.
        notes: What a reader should know.
    """

    unit: str
    curve: str
    last: str
    notes: list[str]


def measure_of(configs: Sequence[JobConfig], ranks: Sequence[int]) -> Measure:
    """Return how the losses of two jobs compare: by the validations of both, or else by their training losses.

    Raises:
        InputError: They do not.
    """
    shared = []
    for config, count in zip(configs, ranks, strict=True):
        text = reading.text_settings(config)
        text["task.name"] = config.task.name
        text[_TOKENS] = sum(p.tokens for p in phases_of(config, world_size=count))
        shared.append(text)
    tokenizers = [settings.pop("tokenizer") for settings in shared]
    templates = [settings.pop("tokenizer.chat_template") for settings in shared]
    reading.require_shared(shared)
    is_one = tokenizers[0] == tokenizers[1] and templates[0] == templates[1]
    other = next(_differences([*map(_of_training, configs)]), "")
    why = "validation.enable is not set in both"
    if all(config.validation.enable for config in configs):
        measured = [_of_validation(*pair) for pair in zip(configs, ranks, strict=True)]
        why = next(_differences(measured), "")
        if not is_one and configs[0].validation.steps != -1:
            why = "validations of other tokens need validation.steps = -1, the whole text"
    if not is_one:
        other = "tokenizer or chat template"
    if why and other:
        raise InputError(
            f"A and B differ in {other}: their training losses do not compare, and {why}"
        )
    if why:
        return Measure("nats", "loss_mean", "loss_mean", [f"loss: of training, since {why}"])
    if not is_one:
        return Measure(
            "bits a byte", "bits_per_byte", "bits_per_byte", ["loss: of validations"]
        )
    notes = ["loss: of validations"]
    if other:
        notes = [f"loss: of validations, each in its own way: A and B differ in {other}"]
    return Measure(
        "nats", "validation_loss" if other else "loss_mean", "validation_loss", notes
    )


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
    whole = section.steps == -1
    read = section.steps * section.local_batch_size * layout_of(config, ranks).dp
    return found | {"validation.steps (sequences of all ranks)": -1 if whole else read}


def _differences(pair: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a key and its two values for each setting that differs."""
    for key in pair[0] | pair[1]:
        values = [settings.get(key) for settings in pair]
        if values[0] != values[1]:
            yield f"{key} ({values[0]!s:.60} and {values[1]!s:.60})"


def why_speeds_differ(a: Side, b: Side, seeds: Sequence[int]) -> str:
    """Return why the times of two sides' runs do not compare, or "" if they do."""
    for side in (a, b):
        if len({side.runs[seed].ranks for seed in seeds}) > 1:
            return f"runs of {side.name} had different numbers of ranks"
    places: dict[str, str] = {}
    for side in (a, b):
        for seed in seeds:
            machine = side.runs[seed].machine or "an unknown machine"
            places.setdefault(machine, f"{side.name}'s seed {seed} on {machine}")
    shown = "; ".join([*places.values()][:3])
    return shown if len(places) > 1 or "an unknown machine" in places else ""
