"""Differences between the settings of a resumed run and those of its checkpoint. Imports no torch.

A run may continue with other settings, and they are reported. It may not continue with another model: it would misuse weights
of the same shapes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import ConfigError, key_text
from .model import model_config
from .render import to_toml
from .schema import JobConfig
from .task import NEXT_TOKEN, task_module, task_options
from .toml import KeyPath, format_value, tomllib

# Settings that decide which samples follow and how they are used. Layouts and limits may change at a resume.
_SECTIONS = ("task", "tokenizer", "optimizer", "lr_scheduler", "data", "phase")
_KEYS = {
    ("debug", "seed"),
    ("loss", "name"),
    *(("model", "converters"), ("model", "freeze"), ("training", "dtype")),
    *(("training", key) for key in ("dataset", "dataset_path", "seq_len", "steps")),
}
# Settings of these sections that change no result: how the update is computed, and where tokens are kept.
_HARMLESS = {
    ("optimizer", "implementation"),
    ("optimizer", "early_step_in_backward"),
    ("data", "cache_folder"),
}
# Sizes that weigh terms of the loss or set the initial weights. They do not change what a model computes.
_OF_TRAINING = {
    *("init_std", "gate_init_std", "mtp_coeff", "load_balance_coeff"),
    *("sequence_balance_coeff", "global_balance_coeff", "router_z_loss_coeff"),
}
_MODEL, _OPTION = "model.overrides.", "task.options."


def job_facts(config: JobConfig) -> dict[str, Any]:
    """Return the settings that decide what a job's model computes, by key, for titan.json.

    They are the family and its sizes, the task, and the task's options, except the options that it lists in `may_change`.
    """
    sizes, module = model_config(config.model), task_module(config)
    names = [field.name for field in dataclasses.fields(sizes) if field.init]
    # A family may say in other words what its sizes follow from.
    of_sizes = sizes.facts or {n: getattr(sizes, n) for n in names}
    facts = {"model.name": config.model.name} | {_MODEL + n: v for n, v in of_sizes.items()}
    facts["task.name"] = NEXT_TOKEN
    if module is not None:
        options = task_options(config)
        free = getattr(options, "may_change", ("path",))
        facts["task.name"] = config.task.name or config.model.name
        facts |= {_OPTION + k: v for k, v in dataclasses.asdict(options).items() if k not in free}
    return json.loads(json.dumps(facts, default=str))  # as titan.json stores it


def changed_model(
    saved: Mapping[str, Any], config: JobConfig, *, of_training: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Compare a step's model with the job's model.

    A key that only one of the two has is not a change, as in `changed_settings`.

    Args:
        saved: the step's titan.json. Steps of an older titan have no facts in it, but a config.
        config: the job.
        of_training: compare the sizes that matter only for training, in place of the sizes that decide what the model computes.

    Returns:
        The old and the new value of each key that differs.
    """
    before = saved.get("model")
    if not before:
        try:
            old = tomllib.loads(saved["config"])
            table = old["model"]
            model = {k: table[k] for k in ("name", "flavor", "overrides") if k in table}
            tables = {"model": model, "task": old.get("task", {})}
            before = job_facts(JobConfig.model_validate(tables))
        # The step has no config, or it is from a titan with other keys, or from a package that is gone.
        except (ConfigError, ValueError, LookupError, TypeError):
            return {}
    now = job_facts(config)
    if before.get("model.name", now["model.name"]) != now["model.name"]:
        now = {"model.name": now["model.name"]}  # the sizes of another family do not compare
    return {
        key: (before[key], new)
        for key, new in now.items()
        if key in before and before[key] != new
        if (key.removeprefix(_MODEL) in _OF_TRAINING) == of_training
    }


def changed_settings(
    saved: str, config: JobConfig, *, sequences: tuple[int | None, int]
) -> list[str]:
    """Return `key: old -> new` for each setting that differs.

    A key that only one of the configs has is not a change: another version of titan wrote it, or it was not set.

    Args:
        saved: the checkpoint's resolved config, as TOML.
        config: the run's config.
        sequences: sequences in a step, then (None if unknown) and now. Their distribution over ranks does not matter.
    """
    # Compare resolved TOML, which has every default.
    before, now = (dict(leaves(tomllib.loads(text))) for text in (saved, to_toml(config)))
    watched = {path for path in now if path[0] in _SECTIONS or path in _KEYS} - _HARMLESS
    if config.lr_scheduler.total_steps:
        watched -= {("training", "steps")}  # the schedule does not depend on them
    changes = [
        (key_text(path), before[path], value)
        for path, value in now.items()
        if path in watched and before.get(path, value) != value
    ]
    # The keys may differ if ranks and accumulation make up for it, so compare the resulting number of sequences.
    if sequences[0] not in (None, sequences[1]):
        changes.append(("training.global_batch_size", *sequences))
    return [f"{key}: {format_value(old)} -> {format_value(new)}" for key, old, new in changes]


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and value of every key that is not a table."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value
