"""The job of a run folder, made to compute some of its steps again: for `titan audit` and `titan swap`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.base.rows import Row, read_rows
from titan.base.untrusted import InputError, read_json
from titan.checkpoint.identity import read_metadata
from titan.checkpoint.manifest import find_damage, list_steps
from titan.checkpoint.storage import Location, as_location, join
from titan.checks.rules import check_to_run, resolve_layout
from titan.config.errors import ConfigError
from titan.config.keys import field_at
from titan.config.load import load_config, print_warnings
from titan.config.permissions import Loss, permission_of, without_permissions
from titan.config.phases import phases_of
from titan.config.schema import JobConfig
from titan.data.tokenizer_files import with_tokenizer
from titan.numerics.recorded import FOLDER, read_steps
from titan.numerics.tables import TABLES

_REPLACED = ("job.dump_folder", "metrics.enable_wandb")


@dataclass(frozen=True)
class Facts:
    """Part of environment.json. Runs of a job with the same facts give the same bits."""

    world_size: int = 1
    titan: str = ""
    git: dict[str, Any] | None = None
    torch: str = ""
    platform: str = ""
    hostname: str = ""
    device_names: list[str] = field(default_factory=list)


@dataclass
class Record:
    """Records of a run, or of its recomputation: rows and recorded steps by step, and the checkpoint of its last step.

    Attributes:
        folder: run folder.
        saved: the checkpoint, if there is one.
    """

    folder: Path
    saved: Location | None

    def __post_init__(self) -> None:
        metrics = self.folder / "metrics.jsonl"
        rows = read_rows(metrics) if metrics.exists() else []
        self.rows: dict[int, Row] = {row["step"]: row for row in rows}
        self.repeated = {
            step for step, times in Counter(r["step"] for r in rows).items() if times > 1
        }
        has_steps = any((self.folder / FOLDER).glob("step-*.json"))
        self.recorded = read_steps(self.folder) if has_steps else []
        self.facts = read_json(self.folder / "environment.json", Facts, within=self.folder)


def open_run(
    run: Path, keys: Sequence[str], *, file: str = "config.toml"
) -> tuple[JobConfig, dict[int, Location], dict[str, Loss]]:
    """Return the job of a run folder, its checkpoints by step, and the keys that the job lost.

    Args:
        run: run folder.
        keys: "--section.key=value"; those that are permissions hold for the run's job.
        file: the job in the run folder.

    Raises:
        InputError: the folder is no run.
        ConfigError: the checkpoints are elsewhere, and no key permits that.
    """
    if not (run / file).is_file():
        raise InputError(f"{run} is no run folder: it has no {file}")
    granted = _granted(keys)
    config = load_config(run / file, overrides=granted.values())
    config = with_tokenizer(config, run=run)  # its copy
    config, lost = without_permissions(
        config, run=run, granted=[*granted, *_REPLACED], takes_keys=True
    )
    if "checkpoint.folder" in lost:  # only a part of what is asked later, which may need it
        raise ConfigError([lost["checkpoint.folder"].problem])
    named = config.checkpoint.folder
    folder = as_location(named) if "://" in named else run / named
    return config, {n: join(folder, f"step-{n}") for n in list_steps(folder)}, lost


def _granted(keys: Sequence[str]) -> dict[str, str]:
    """Return those of the command line's `--key=value` that are permissions, by key."""
    given = {key.lstrip("-").partition("=")[0]: key for key in keys}
    fields = {name: field_at(tuple(name.split("."))) for name in given}
    return {
        name: given[name] for name, field in fields.items() if field and permission_of(field)
    }


def require_permissions(lost: dict[str, Loss], config: JobConfig, *, has_base: bool) -> None:
    """Print the keys that a job lost and that only say where files are written.

    Args:
        lost: the keys. Those that nothing reads are taken out.
        config: the job.
        has_base: whether it begins from one of the run's own checkpoints.

    Raises:
        ConfigError: without another key, the job would compute something else.
    """
    if has_base:
        lost.pop("checkpoint.initial_load_path", None)
    if config.tokenizer.path and (has_base or not config.checkpoint.initial_load_in_hf):
        lost.pop("model.hf_assets_path", None)  # nothing is read there
    if needed := [loss.problem for loss in lost.values() if loss.permission.to != "write"]:
        raise ConfigError(needed)
    print_warnings(str(loss.problem) for loss in lost.values())


def newest_start(saved: Mapping[int, Location], *, before: int) -> int | None:
    """Return the newest step before another one that a run can continue from."""
    for step in sorted(saved, reverse=True):
        path = saved[step]
        if step < before and not (find_damage(path) or read_metadata(path).get("model_only")):
            return step
    return None


def recomputation(
    config: JobConfig,
    *,
    world_size: int,
    base: Location | None,
    step: int,
    saves: bool = False,
    record: list[int],
) -> dict[str, Any]:
    """Return the keys that make a job compute again the steps up to one, and their values.

    Args:
        config: the job.
        world_size: ranks of the run.
        base: checkpoint to begin from. None: from the start.
        step: the last step.
        saves: whether to save that step.
        record: steps to record.
    """
    begin = phases_of(config, world_size=world_size)[1:]
    training, schedule = config.training, config.lr_scheduler
    changes: dict[str, Any] = {
        **TABLES["records"],
        **TABLES["recomputed"],
        "training.steps": step,
        # That of the run, on any number of ranks.
        "training.global_batch_size": sequences_of(config, world_size),
        "lr_scheduler.total_steps": schedule.total_steps or training.steps,
        "checkpoint.enable": base is not None or saves,
        "checkpoint.interval": step,
        "debug.record_steps": record,
    }
    if config.phase:
        changes["phase"] = [
            phase.model_dump(exclude_none=True)
            for phase, at in zip(config.phase, begin, strict=True)
            if at.first_step <= step
        ]
    if getattr(config, "evaluation", None):
        changes["evaluation"] = []
    if base is not None:
        changes |= {"checkpoint.initial_load_path": str(base), **TABLES["loaded"]}
    return changes


def sequences_of(config: JobConfig, world_size: int) -> int:
    """Return the sequences of a step."""
    layout = resolve_layout(config, world_size)
    return layout.dp * layout.accumulation * config.training.local_batch_size


def ranks_of(config: JobConfig, world_size: int) -> int:
    """Return the least number of ranks, from a run's own on, that the layout of a job fits."""
    for ranks in range(world_size, 8 * world_size + 64):
        with suppress(ConfigError):
            check_to_run(config, world_size=ranks)
            return ranks
    return world_size
