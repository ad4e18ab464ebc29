"""Runs of a sweep: all combinations of the values of some keys, and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from zlib import crc32

from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError, read_json
from titan.config.keys import sections_with
from titan.config.options import mistake
from titan.config.render import to_toml
from titan.config.schema import JobConfig

INDEX = "sweep.json"
SEED = "debug.seed"
_OURS = {SEED: "seeds are --seeds N", "job.dump_folder": "each run has its own; use --folder"}
_MOST = 1000  # runs of a sweep
# Commas within quotes, and within brackets and braces (two levels), belong to a value.
_VALUE = re.compile(
    r"""(?:[^,\[\]{}"']|\[(?:[^][]|\[[^]]*\])*\]|\{(?:[^{}]|\{[^}]*\})*\}|"[^"]*"|'[^']*')+"""
)


@dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Attributes:
        name: name of the run, and of its folder.
        settings: values of the keys, as they are written on the command line, without the seed.
        seed: seed of the run.
        steps: steps of the whole run.
        folder: folder of the sweep.
    """

    name: str
    settings: dict[str, str]
    seed: int
    steps: int
    folder: Path = field(default=Path(), repr=False)

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
    def state(self) -> str:
        """Return the state in status.json, "diverged", "stopped early" before the last step, or "waiting" without a run."""
        status = RunFolder(self.run).status
        if status.kind == "loss_not_finite":
            return "diverged"
        is_early = status.state == "done" and status.step < self.steps
        return "stopped early" if is_early else status.state or "waiting"


def parse_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key of options such as "optimizer.lr=1e-3,3e-3".

    Raises:
        ConfigError: An option has no key, a value that cannot be read, or a value twice.
    """
    settings: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        found = _VALUE.findall(values)
        known = settings.setdefault(key, [])
        known += [value.strip() for value in found]
        problem = ""
        if not equals or not found or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", key):
            section = next(iter(sections_with(key)), "optimizer")
            like = f"{section}.{key if sections_with(key) else 'lr'}"
            problem = f"expected a key and its values, such as {like}=1e-3,3e-3"
        elif ",".join(found) != values:
            problem = "a value is empty, or a bracket, brace or quote has no partner; quote such a value"
        elif key in _OURS:
            problem = _OURS[key]
        elif len({*known}) < len(known):
            problem = f"a value of {key} is there twice"
        if problem:
            raise mistake("--set", f"{text}: {problem}")
    return settings


def combinations(
    settings: dict[str, list[str]], seeds: int
) -> list[tuple[dict[str, str], int]]:
    """Return the settings and the seed of each run.

    Raises:
        ConfigError: There are too many.
    """
    every = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    if len(every) * seeds > _MOST:
        many = f"{len(every)} combinations with {seeds} seeds are more than {_MOST} runs"
        raise mistake("--set", many)
    return [(values, seed) for values in every for seed in range(seeds)]


def name_of(settings: dict[str, str], seed: int, *, seeds: int) -> str:
    """Return the name of a run, such as "lr=1e-3,flavor=tiny,seed=1"."""
    short = [key.rpartition(".")[2] for key in settings]
    parts = [
        f"{last if short.count(last) == 1 else key}={value}"
        for last, (key, value) in zip(short, settings.items(), strict=True)
    ]
    parts += [f"seed={seed}"] if seeds > 1 or not parts else []
    whole = ",".join(parts)
    name = re.sub(r"[^\w.=,+-]", "_", whole).encode()
    # The whole is too long for a file's name, and may differ at its end only.
    long = f"{name[:150].decode(errors='ignore')}-{crc32(whole.encode()):08x}"
    return long if len(name) > 150 else name.decode()


def write(trials: Sequence[tuple[Trial, JobConfig]], folder: Path) -> None:
    """Write the job of each run, and the list of runs.

    Raises:
        InputError: A run's folder has another job, or the folder has runs that are not among these.
    """
    before = [old.name for old in read(folder)] if (folder / INDEX).is_file() else []
    if lost := {*before} - {trial.name for trial, _ in trials}:
        raise InputError(
            f"{folder} is the folder of a sweep with {min(lost)}: use another --folder, or give its values, too"
        )
    # The runs that were there keep their order.
    trials = sorted(trials, key=lambda pair: [*before, pair[0].name].index(pair[0].name))
    texts = [(trial, to_toml(config)) for trial, config in trials]
    for trial, text in texts:
        job = trial.job
        if job.is_file() and trial.run.is_dir() and job.read_text(encoding="utf-8") != text:
            raise InputError(
                f"{trial.run} is a run of another job than today's {trial.name}: use another --folder"
            )
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--folder {folder}: {error.strerror}") from None
    rows = []
    for trial, text in texts:
        trial.job.write_text(text, encoding="utf-8")
        rows.append({key: value for key, value in vars(trial).items() if key != "folder"})
    (folder / INDEX).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Trial]:
    """Return the runs of a sweep's folder.

    Raises:
        InputError: It is no folder of a sweep.
    """
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder}: no folder of a sweep: {INDEX} is missing")
    return [replace(row, folder=folder) for row in read_json(folder / INDEX, list[Trial])]
