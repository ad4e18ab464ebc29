"""titan.json, the description of a step, and the check that the job's model can continue it. Imports no torch.

titan.train asks before it imports anything, and titan/checkpoint/manager.py asks again about the step that is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan.checkpoint import CheckpointError
from titan.checkpoint.formats import LOST, NEWER, require_known, unreadable
from titan.checkpoint.manifest import TITAN_JSON, list_steps
from titan.checkpoint.storage import Location, join, read_file
from titan.config.resume_diff import changed_model
from titan.config.schema import JobConfig
from titan.config.toml import format_value
from titan.untrusted import Count, InputError, parse_json


@dataclass
class _Saved:
    """Fields of titan.json that titan reads, with the types to check."""

    step: Count = 0
    tokens: Count = 0
    model_only: bool = False
    config: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)


def read_metadata(path: Location, *required: str) -> dict[str, Any]:
    """Return the `metadata` that a step was saved with.

    Args:
        path: folder of the step.
        *required: keys that the metadata must have.

    Raises:
        CheckpointError: the file is unusable, or lacks a required key.
    """
    name = join(path, TITAN_JSON)
    try:
        text = read_file(name)
        require_known(text, file=name)
        parse_json(text, _Saved, name=name)
        content = parse_json(text, dict[str, Any], name=name)
    except OSError as error:
        raise unreadable(name, error) from error
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{path} is not a checkpoint of titan: {error}") from error
    if missing := [key for key in required if key not in content]:
        raise CheckpointError(f"{name}: lacks {', '.join(missing)}")
    return content


def require_same_model(path: Location, config: JobConfig, *, but: Collection[str] = ()) -> None:
    """Check that a step's model computes the same as the job's model.

    Args:
        path: folder of the step.
        config: the job.
        but: keys that may differ.

    Raises:
        CheckpointError: the models differ. The message names the keys.
    """
    found = changed_model(read_metadata(path), config)
    changes = {key: values for key, values in found.items() if key not in but}
    if not changes:
        return
    (key, (old, new)), *others = changes.items()
    also = "; ".join(f"{k}: {format_value(a)} -> {format_value(b)}" for k, (a, b) in others[:4])
    rest = f" (also {also}{', ...' * (len(others) > 4)})" if others else ""
    message = (
        f"{format_value(new)}, but {path} was saved with {format_value(old)}{rest}: this is another model. Set it back. Or, to begin "
        f"with what fits of these weights, name another job.dump_folder, checkpoint.initial_load_path = {format_value(str(path))} and "
        f"checkpoint.initial_load_changes = {format_value([*but, *changes])}"
    )
    problem = config.source_map.problem(key, message)
    raise CheckpointError(str(problem), kind="checkpoint_differs")


def step_to_continue(config: JobConfig) -> int:
    """Return the step that a run continues after, or 0. Only local folders are read, so the trainer may find another."""
    section, saved = config.checkpoint, require_startable(config)
    if not saved:
        return 0
    is_own = list_steps(Path(config.job.dump_folder) / section.folder)
    return saved.get("step", 0) if is_own or not section.initial_load_model_only else 0


def require_startable(config: JobConfig) -> dict[str, Any]:
    """Return the titan.json of the step that a run would continue from, or begin with.

    Only local folders are read. Whether the step is whole is checked later.

    Returns:
        The contents, or {} if there is no step or none can be read.

    Raises:
        CheckpointError: the step has another model, or a newer titan wrote it.
    """
    section, may_differ = config.checkpoint, list[str]()
    if not section.enable or "://" in section.folder:
        return {}
    folder = Path(config.job.dump_folder) / section.folder
    try:
        numbers = reversed(list_steps(folder))
    except CheckpointError:
        return {}  # the manager tries again, and reports it
    steps = [join(folder, f"step-{n}") for n in numbers if section.load_step in (-1, n)]
    other = section.initial_load_path or "://"
    if not steps and "://" not in other and not section.initial_load_in_hf:
        steps, may_differ = [Path(other)], section.initial_load_changes
    for path in steps:
        try:
            found = read_metadata(path)
            break
        except CheckpointError as error:
            if error.kind == NEWER:
                raise
            if error.kind == LOST:
                return {}  # as above
    else:
        return {}
    require_same_model(path, config, but=may_differ)
    return found
