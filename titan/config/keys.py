"""Lookup of keys in the section classes: which keys exist where, and their types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .schema import JobConfig
from .toml import KeyPath


def models_at(path: KeyPath, *, data: Any = None) -> list[type[BaseModel]]:
    """Return the sections that a table at `path` may be: one section, or the members of a union.

    Args:
        path: the table's keys.
        data: the whole config as read. It narrows a union to the member that the table names.
    """
    # Go from the top down: each key narrows the sections that the next table may be.
    models: list[type[BaseModel]] = [JobConfig]
    for part in path:
        data = _child(data, part)
        # An index selects an item of a list, which has the sections of the list.
        if isinstance(part, str):
            fields = [m.model_fields[part] for m in models if part in m.model_fields]
            models = [model for f in fields for model in _models_in(f.annotation)]
        # A table that names no member may be any member.
        models = [m for m in models if _is_named(m, data)] or models
    return models


def fields_at(path: KeyPath, *, data: Any = None) -> dict[str, FieldInfo]:
    """Return the keys that the table at `path` may have, with their fields."""
    return {
        name: f
        for model in models_at(path, data=data)
        for name, f in model.model_fields.items()
    }


def field_at(path: KeyPath) -> FieldInfo | None:
    """Return the field that a key names, or None if no section has it."""
    return fields_at(path[:-1]).get(str(path[-1])) if path else None


def sections_with(key: str) -> list[str]:
    """Return the top-level sections that have `key`."""
    return [name for name in JobConfig.model_fields if key in fields_at((name,))]


def _child(data: Any, part: str | int) -> Any:
    try:
        return data[part]
    except (KeyError, IndexError, TypeError):
        return None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _is_named(model: type[BaseModel], data: Any) -> bool:
    """Return whether `data` names this member of a union, by a key with a single choice such as `type = "text"`."""
    tags = {
        name: get_args(f.annotation)
        for name, f in model.model_fields.items()
        if get_origin(f.annotation) is Literal
    }
    return isinstance(data, dict) and any(
        len(choices) == 1 and data.get(name) == choices[0] for name, choices in tags.items()
    )
