"""Config as TOML, and section classes as a JSON schema for editors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from .schema import JobConfig
from .toml import KeyPath, format_value, key_text


def to_toml(config: JobConfig, *, comments: bool = False) -> str:
    """Return TOML that loads to an equal config.

    Args:
        config: the config. Values that are None are left out.
        comments: add the help of each key as a comment.
    """
    config = config.whole
    lines = ["# A resolved titan config: every value, defaults included."]
    is_open = config.parallelism.layout == "auto"
    for name in JobConfig.model_fields:
        section = getattr(config, name)
        # A key that is written is held. So a layout that is to be chosen has only the keys that the job sets.
        if is_open and name in ("parallelism", "activation_checkpoint"):
            section = {key: getattr(section, key) for key in section.model_fields_set}
        tables, header = (
            (section, "[[{}]]") if isinstance(section, list) else ([section], "[{}]")
        )
        for table in tables:
            lines += _table((name,), table, comments=comments, header=header)
    return "\n".join(lines) + "\n"


def _table(
    path: KeyPath, section: Any, *, comments: bool, header: str = "[{}]"
) -> Iterator[str]:
    # A table is a section, or a dict of free keys such as model.overrides.
    values = dict(section) if isinstance(section, BaseModel) else section
    fields = type(section).model_fields if isinstance(section, BaseModel) else {}
    # TOML needs plain values before the first header of an inner table.
    inner = {name: value for name, value in values.items() if _is_table(value)}
    if any(v is not None and n not in inner for n, v in values.items()) or "[[" in header:
        yield from ("", header.format(key_text(p for p in path if isinstance(p, str))))
    for name, value in values.items():
        if value is None or name in inner:  # TOML has no null
            continue
        if comments and name in fields and (text := fields[name].description):
            yield from (f"# {line}" for line in text.splitlines())
        yield f"{key_text([name])} = {format_value(value)}"
    for name, value in inner.items():
        if isinstance(value, list):
            for item in value:
                yield from _table((*path, name), item, comments=comments, header="[[{}]]")
        else:
            yield from _table((*path, name), value, comments=comments)


def _is_table(value: Any) -> bool:
    """Return whether a value needs its own header."""
    if isinstance(value, list):
        return any(isinstance(item, BaseModel) for item in value)
    return isinstance(value, BaseModel | dict)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file, for editors."""
    # pydantic returns a copy, which can be edited.
    schema = JobConfig.model_json_schema()
    _relax_unions(schema)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
    return schema | {"title": "titan job file"}


def _relax_unions(node: Any) -> None:
    """Make unions `anyOf`, in place. An [optimizer] without a name fits several members, which `oneOf` forbids."""
    if isinstance(node, dict):
        if "discriminator" in node:
            del node["discriminator"]  # OpenAPI's; JSON schema does not know it
            node["anyOf"] = node.pop("oneOf")
        for inner in node.values():
            _relax_unions(inner)
    elif isinstance(node, list):
        for inner in node:
            _relax_unions(inner)
