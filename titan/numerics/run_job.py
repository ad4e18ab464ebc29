"""The job of a run folder and its checkpoints, with the permissions that it has: for `titan audit` and `titan swap`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from titan.base.untrusted import InputError
from titan.checkpoint.identity import read_metadata
from titan.checkpoint.manifest import find_damage, list_steps
from titan.checkpoint.storage import Location, as_location, join
from titan.config.errors import ConfigError
from titan.config.keys import field_at
from titan.config.load import load_config, print_warnings
from titan.config.permissions import Loss, permission_of, without_permissions
from titan.config.schema import JobConfig
from titan.data.tokenizer_files import with_tokenizer

_REPLACED = ("job.dump_folder", "metrics.enable_wandb")


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
    granted = {}
    for key in keys:
        name = key.lstrip("-").partition("=")[0]
        field = field_at(tuple(name.split(".")))
        if field and permission_of(field):
            granted[name] = key
    return granted


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
