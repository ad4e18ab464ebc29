"""Runs of a sweep: all combinations of the values of some keys, and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.run_folder import read_status
from titan.sim.report.text import mistake
from titan.untrusted import InputError, read_json

INDEX = "sweep.json"
_SEED = "debug.seed"
_OURS = {_SEED: "seeds are --seeds N", "job.dump_folder": "each run has its own; use --folder"}
_MOST = 1000  # runs of a sweep
# Commas within quotes, and within brackets and braces (two levels), belong to a value.
_VALUE = re.compile(r"""(?:[^,\[\]{}"']|\[(?:[^][]|\[[^]]*\])*\]|\{(?:[^{}]|\{[^}]*\})*\}|"[^"]*"|'[^']*')+""")  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Attributes:
        name: Name of the run, and of its folder.
        folder: Folder of the sweep.
        settings: Values of the keys, as they are written on the command line, without the seed.
        seed: Seed of the run.
        steps: Steps of the whole run.
    """

    name: str
    folder: Path = field(repr=False)
    settings: dict[str, str]
    seed: int
    steps: int

    @property
    def job(self) -> Path:
        """Return the run's job file."""
        return self.folder / "jobs" / f"{self.name}.toml"

    @property
    def log(self) -> Path:
        """Return the file of what the run prints."""
        return self.folder / "jobs" / f"{self.name}.log"

    @property
    def run(self) -> Path:
        """Return the run's folder."""
        return self.folder / self.name

    @property
    def is_done(self) -> bool:
        """Return whether the run has ended well after its steps, or by a loss that is not finite."""
        status = read_status(self.run)
        if status.get("kind") == "loss_not_finite":
            return True
        return status.get("state") == "done" and int(status.get("step") or 0) >= self.steps


def parse_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key of options such as "optimizer.lr=1e-3,3e-3".

    Raises:
        ConfigError: An option has no key, a value that cannot be read, or a value twice.
    """
    settings: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        found = _VALUE.findall(values)
        if not equals or not found or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", key):
            raise mistake("--set", f"{text}: expected a key and its values, such as optimizer.lr=1e-3,3e-3")  # fmt: skip
        if ",".join(found) != values:
            raise mistake("--set", f"{text}: a value is empty, or a bracket, brace or quote has no partner; quote such a value")  # fmt: skip
        if key in _OURS:
            raise mistake("--set", f"{text}: {_OURS[key]}")
        settings.setdefault(key, []).extend(value.strip() for value in found)
        if len({*settings[key]}) < len(settings[key]):
            raise mistake("--set", f"{text}: a value of {key} is there twice")
    return settings


def combinations(settings: dict[str, list[str]], seeds: int) -> list[tuple[dict[str, str], int]]:
    """Return the settings and the seed of each run.

    Raises:
        ConfigError: There are too many.
    """
    every = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    if len(every) * seeds > _MOST:
        raise mistake("--set", f"{len(every)} combinations with {seeds} seeds are more than {_MOST} runs")  # fmt: skip
    return [(values, seed) for values in every for seed in range(seeds)]


def name_of(settings: dict[str, str], seed: int, *, seeds: int) -> str:
    """Return the name of a run, such as "lr=1e-3,flavor=tiny,seed=1"."""
    short = [key.rpartition(".")[2] for key in settings]
    keys = [s if short.count(s) == 1 else key for s, key in zip(short, settings, strict=True)]
    parts = [f"{key}={value}" for key, value in zip(keys, settings.values(), strict=True)]
    parts += [f"seed={seed}"] if seeds > 1 or not parts else []
    whole = ",".join(parts)
    name = re.sub(r"[^\w.=,+-]", "_", whole).encode()
    # The whole is too long for a file's name, and may differ at its end only.
    long = f"{name[:150].decode(errors='ignore')}-{crc32(whole.encode()):08x}"
    return long if len(name) > 150 else name.decode()


def arguments(settings: dict[str, str], seed: int, run: Path) -> list[str]:
    """Return the overrides of a run."""
    overrides = [f"--{key}={value}" for key, value in settings.items()]
    return [*overrides, f"--{_SEED}={seed}", f"--job.dump_folder={run}"]


def write(trials: Sequence[tuple[Trial, JobConfig]], folder: Path) -> None:
    """Write the job of each run, and the list of runs.

    Raises:
        InputError: A run's folder has another job, or the folder has runs that are not among these.
    """
    before = [old.name for old in read(folder)] if (folder / INDEX).is_file() else []
    if lost := {*before} - {trial.name for trial, _ in trials}:
        raise InputError(f"titan sweep: {folder} is the folder of a sweep with {min(lost)}: use another --folder, or give its values, too")  # fmt: skip
    # The runs that were there keep their order.
    trials = sorted(trials, key=lambda pair: [*before, pair[0].name].index(pair[0].name))
    texts = {trial.job: to_toml(config) for trial, config in trials}
    for (trial, _), (file, text) in zip(trials, texts.items(), strict=True):
        if file.is_file() and trial.run.is_dir() and file.read_text(encoding="utf-8") != text:
            raise InputError(f"titan sweep: {trial.run} is a run of another job than today's {trial.name}: use another --folder")  # fmt: skip
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"titan sweep: --folder {folder}: {error.strerror}") from None
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    rows = [
        {"name": trial.name, "settings": trial.settings, "seed": trial.seed, "steps": trial.steps}
        for trial, _ in trials
    ]
    (folder / INDEX).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Trial]:
    """Return the runs of a sweep's folder.

    Raises:
        InputError: It is no folder of a sweep.
    """
    if not (folder / INDEX).is_file():
        raise InputError(f"titan sweep: {folder}: no folder of a sweep: {INDEX} is missing")
    rows: list[Any] = read_json(folder / INDEX, list)
    try:
        return [
            Trial(row["name"], folder, row["settings"], row["seed"], row["steps"]) for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise InputError(f"titan sweep: {folder / INDEX}: not a list of runs: {error}") from None
