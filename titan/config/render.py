"""A config as TOML, and the sections as JSON schema and as a reference page; all from the section classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from .keys import models_at
from .schema import JobConfig
from .toml import KeyPath, format_value, key_text

_INTRODUCTION = """\
# Configuration reference

Generated from titan/config/schema.py by `python scripts/gen_docs.py`; do not edit.

A job is one TOML file. `titan train JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`: overlays are merged
over the job file from left to right (tables key by key; lists and single values are replaced whole), then
`--section.key=value` wins. A value on the command line is TOML where it can be read as TOML, else a string;
`--metrics.enable_tensorboard` alone means true. `titan config JOB.toml` prints the result.

An editor with a TOML language server completes and checks keys in a file that begins with
`#:schema ../docs/schema.json` (the path is relative to the file).
"""

_SCHEDULE = """\
The learning rate at step s = 1, 2, ... of T = `total_steps` (or `training.steps`), with W = `warmup_steps`:

- up to step W, warm-up: `lr * s / W`;
- then `lr`, until the last D = `round(T * decay_ratio)` steps; without `decay_ratio`, D = T - W: decay begins at once;
- in those, `lr * (m + (1 - m) * f(p))`, where p goes from 0 at the first to `(D - 1) / D` at the last, m = `min_lr_factor`, and
  f(p) is `1 - p` (linear), `1 - sqrt(p)` (sqrt) or `(1 + cos(pi * p)) / 2` (cosine).

The decay ends a step after the last one, so that no step has a rate of 0, as in TorchTitan. After step T the rate is `lr * m`. Where
W + D is more than T, W is cut to T, then D to T - W.
"""


def to_toml(config: JobConfig, *, comments: bool = False) -> str:
    """TOML that loads to an equal config; unset (None) values are left out, `comments` adds the keys' help."""
    lines = ["# A resolved titan config: every value, defaults included."]
    for name in JobConfig.model_fields:
        lines += _table((name,), getattr(config, name), comments=comments)
    return "\n".join(lines) + "\n"


def _table(path: KeyPath, section: Any, *, comments: bool, header: str = "[{}]") -> Iterator[str]:
    values = dict(section) if isinstance(section, BaseModel) else section
    fields = type(section).model_fields if isinstance(section, BaseModel) else {}
    inner = {name: value for name, value in values.items() if _is_table(value)}
    if len(inner) < len(values) or "[[" in header:
        yield from ("", header.format(key_text(p for p in path if isinstance(p, str))))
    for name, value in values.items():
        if value is None or name in inner:
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
    """Whether a value needs a header of its own."""
    if isinstance(value, list):
        return any(isinstance(item, BaseModel) for item in value)
    return isinstance(value, BaseModel | dict)


def json_schema() -> dict[str, Any]:
    """JSON schema of a job file, for editors."""
    schema = JobConfig.model_json_schema()
    _relax_unions(schema)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
    return schema | {"title": "titan job file"}


def _relax_unions(node: Any) -> None:
    """Make unions `anyOf`: an [optimizer] without a name fits several members, which `oneOf` forbids."""
    if isinstance(node, dict):
        if "discriminator" in node:
            del node["discriminator"]  # OpenAPI's; JSON schema knows it not
            node["anyOf"] = node.pop("oneOf")
        for inner in node.values():
            _relax_unions(inner)
    elif isinstance(node, list):
        for inner in node:
            _relax_unions(inner)


def reference_markdown() -> str:
    """The reference page docs/config.md."""
    definitions = json_schema()["$defs"]
    lines = [_INTRODUCTION]
    for name in JobConfig.model_fields:
        lines += _reference((name,), definitions)
        if name == "lr_scheduler":
            lines.append(_SCHEDULE)
    return "\n".join(lines).rstrip() + "\n"


def _reference(path: KeyPath, definitions: dict[str, Any]) -> Iterator[str]:
    """Heading and table of a section, or of each member of a union, then of the sections within."""
    models = models_at(path)
    for model in models:
        properties = definitions[model.__name__]["properties"]
        inner = [name for name in properties if models_at((*path, name))]
        tag = next((f'{n} = "{p["const"]}"' for n, p in properties.items() if "const" in p), "")
        is_list = path == ("data", "sources")
        heading = f"[[{key_text(path)}]]" if is_list else f"[{key_text(path)}]"
        if set(inner) != set(properties):
            yield f"## {heading} {tag}".rstrip() + "\n"
            yield (model.__doc__ or "").strip() + "\n"
            yield from ("| key | type | default | meaning |", "|---|---|---|---|")
            for name, about in properties.items():
                if name not in inner and "const" not in about:
                    required = name in definitions[model.__name__].get("required", [])
                    yield _row(name, about, required=required)
            yield ""
        for name in inner:
            yield from _reference((*path, name), definitions)


def _row(name: str, about: dict[str, Any], *, required: bool) -> str:
    default = "required" if required else _default(about.get("default"))
    meaning = " ".join(about.get("description", "").split())
    return (
        "| "
        + " | ".join(c.replace("|", "\\|") for c in (f"`{name}`", _type(about), default, meaning))
        + " |"
    )


def _default(value: Any) -> str:
    return "unset" if value is None else f"`{format_value(value)}`"


def _type(about: dict[str, Any]) -> str:
    """The type of a key in words, from its JSON schema."""
    if "enum" in about or "const" in about:
        return ", ".join(f"`{format_value(v)}`" for v in about.get("enum", [about.get("const")]))
    if "anyOf" in about:
        return " or ".join(_type(a) for a in about["anyOf"] if a.get("type") != "null")
    kind = about.get("type", "")
    if kind == "array":
        return f"list of ({_type(about['items'])})"
    if kind == "object":
        return f"table of ({_type(about['additionalProperties'])})"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "string": "text",
    }[kind]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {format_value(about[name])}" for name, sign in signs.items() if name in about
    ]
    return " ".join([words, ", ".join(bounds)]).rstrip()
