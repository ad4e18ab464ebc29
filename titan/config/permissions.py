"""Configs that come with data lose their permissions. Imports no torch.

A job file that a person names is obeyed. The config of a checkpoint (titan.json) or of a run folder (config.toml) was written by
whoever made the folder, so that a key with a `Permission` (base.py) goes back to its default there. For example:

    titan.json: model.trust_remote_code = true     ->  false, unless the command line has --trust-remote-code
    config.toml: checkpoint.folder = "s3://b/run"  ->  "checkpoint", and a line says to name the URL
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .base import Permission, Section
from .errors import KeyPath, Problem, key_text
from .schema import JobConfig
from .toml import format_value

S = TypeVar("S", bound=Section)


def permission_of(field: Any) -> Permission | None:
    """Return the permission that a field of a section is, or None."""
    return next((mark for mark in field.metadata if isinstance(mark, Permission)), None)


@dataclass(frozen=True)
class Loss:
    """Key that a config lost.

    Attributes:
        permission: the permission that it is.
        problem: line for the user, with the option that gives the permission.
    """

    permission: Permission
    problem: Problem


def without_permissions(
    config: JobConfig,
    *,
    run: Path | None,
    granted: Collection[str] = (),
    takes_keys: bool = False,
) -> tuple[JobConfig, dict[str, Loss]]:
    """Return a config without permissions, and the keys that it lost.

    Args:
        config: config that comes with data.
        run: folder of the run or the step that it belongs to. None: it has no local folder.
        granted: keys that stay, because the command line gives them.
        takes_keys: whether the command takes --KEY=VALUE, which gives any permission.
    """
    kept = _Filter(run, granted)
    config = kept.section(config, ()) or config
    losses = {}
    for key, (mark, value) in kept.lost.items():
        option = f"--{key}={format_value(value)}"
        if mark.option and not takes_keys:
            option = mark.option
        message = f"{format_value(value)} is not obeyed, since this file was not named as a job; {option} gives the permission"
        losses[key] = Loss(mark, config.source_map.problem(key, message))
    return config, losses


@dataclass
class _Filter:
    """Removal of permissions from a config.

    Attributes:
        run: folder of the run or the step that the config belongs to, or None.
        granted: keys that stay.
        lost: permission and value of each key that was removed.
    """

    run: Path | None
    granted: Collection[str]
    lost: dict[str, tuple[Permission, Any]] = field(default_factory=dict)

    def section(self, section: S, path: KeyPath) -> S | None:
        """Return a section without permissions, or None if it is nothing without them, as a dataset of the hub."""
        changes: dict[str, Any] = {}
        for name, its_field in section.__class__.model_fields.items():
            value, inner = vars(section).get(name), (*path, name)
            mark, key = permission_of(its_field), key_text(inner)
            if isinstance(value, Section):
                changes[name] = self.section(value, inner)
            elif isinstance(value, list) and any(isinstance(item, Section) for item in value):
                items = [self.section(item, (*inner, n)) for n, item in enumerate(value)]
                changes[name] = [item for item in items if item is not None]
            elif mark is None or key in self.granted or value == its_field.default:
                continue
            elif mark.is_needed(value, self.run):
                self.lost[key] = mark, value
                if its_field.is_required():
                    return None
                changes[name] = its_field.default
        changed = {k: v for k, v in changes.items() if v is not vars(section)[k]}
        return section.model_copy(update=changed) if changed else section
