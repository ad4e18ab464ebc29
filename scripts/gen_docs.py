"""Write docs/config.md and docs/schema.json from the config classes, and a notebook from docs/index.md. A test fails if they are stale."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from titan.config.keys import models_at
from titan.config.model import families, family, is_plug_in
from titan.config.render import json_schema
from titan.config.schema import JobConfig
from titan.config.toml import KeyPath, format_value, key_text

sys.path.insert(0, str(Path(__file__).resolve().parent))
from notebook import notebook

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_INTRODUCTION = """\
# Configuration reference

<!-- Generated from titan/config/schema*.py by `python scripts/gen_docs.py`; do not edit. -->

A job is one TOML file: `titan train JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`. Overlays are merged over the job
file from left to right: tables key by key, lists and single values as a whole. Then `--section.key=value` replaces both. A value
on the command line is TOML if it can be read as TOML, else a string. `--metrics.enable_tensorboard` alone means true.
`titan config JOB.toml` prints the result.

An editor with a TOML language server completes and checks keys in a file that begins with `#:schema ../docs/schema.json` (the
path is relative to the file).
"""

_SCHEDULE = """\
The learning rate at step s = 1, 2, ... of T = `total_steps` (or `training.steps`), with W = `warmup_steps`:

- up to step W (warm-up): `lr * s / W`
- until the last D = `round(T * decay_ratio)` steps: `lr`. Without `decay_ratio`, D = T - W, and decay begins at once
- in the last D steps: `lr * (m + (1 - m) * f(p))`, where p goes from 0 to `(D - 1) / D`, m = `min_lr_factor`, and f(p) is
  `1 - p` (linear), `1 - sqrt(p)` (sqrt) or `(1 + cos(pi * p)) / 2` (cosine)

As in TorchTitan, the decay ends one step after the last, so that no step has a rate of 0. After step T the rate is `lr * m`. If
W + D is more than T, W is cut to T first, then D to T - W.
"""


def generated() -> dict[Path, str]:
    """Return path and content of every generated page."""
    return {
        DOCS / "config.md": reference_markdown(),
        DOCS / "first_run.ipynb": notebook(DOCS / "index.md"),
        DOCS / "schema.json": json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n",
    }


def reference_markdown() -> str:
    """Return the reference page docs/config.md."""
    definitions = json_schema()["$defs"]
    lines = [_INTRODUCTION]
    for name in JobConfig.model_fields:
        lines += _reference((name,), definitions)
        if name == "lr_scheduler":
            lines.append(_SCHEDULE)
        if name == "model":
            lines += [*_overrides(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _overrides() -> Iterator[str]:
    """Yield what `model.overrides` may name: the fields of each family, with the values that a flavor leaves as they are."""
    yield "### Fields of `model.overrides`\n"
    yield "`model.name` chooses the family, and `model.flavor` the values of these fields. Overrides replace them.\n"
    yield from ("| families | fields and their defaults | meaning |", "|---|---|---|")
    kinds = {
        name: type(next(iter(family(name).FLAVORS.values())))
        for name in families()
        if not is_plug_in(name) and family(name).FLAVORS
    }
    # A class comes before those that build on it.
    for kind in sorted(
        {c for k in kinds.values() for c in k.__mro__ if is_dataclass(c)},
        key=lambda c: (len(c.__mro__), c.__name__),
    ):
        own = [
            f
            for f in fields(kind)
            if f.name in vars(kind).get("__annotations__", {}) and f.init
        ]
        if own:
            users = ", ".join(name for name, k in kinds.items() if kind in k.__mro__)
            shown = (f"`{f.name}`" + _default_of(f) for f in own)
            about = " ".join((kind.__doc__ or "").replace("Attributes:", "").split())
            yield f"| {users} | {', '.join(shown)} | {about} |"


def _default_of(field: Field[Any]) -> str:
    return "" if field.default is MISSING else f" = {format_value(field.default)}"


def _reference(
    path: KeyPath, definitions: dict[str, Any], *, alike: Sequence[KeyPath] = ()
) -> Iterator[str]:
    """Yield heading and table of a section (of each member of a union), then of the sections within it.

    Args:
        path: the section.
        definitions: the classes of the JSON schema.
        alike: sections with the same keys, which share heading and table.
    """
    models = models_at(path)
    for model in models:
        properties = definitions[model.__name__]["properties"]
        inner = [name for name in properties if models_at((*path, name))]
        tag = next((f'{n} = "{p["const"]}"' for n, p in properties.items() if "const" in p), "")
        is_list = path in (("data", "sources"), ("phase",), ("evaluation",))
        heading = ", ".join(f"[{key_text(p)}]" for p in (path, *alike))
        heading = f"[{heading}]" if is_list else heading
        if set(inner) != set(properties):
            yield f"## {heading} {tag}".rstrip() + "\n"
            yield inspect.cleandoc(model.__doc__ or "") + "\n"
            yield from ("| key | type | default | meaning |", "|---|---|---|---|")
            for name, about in properties.items():
                if name not in inner and "const" not in about:
                    required = name in definitions[model.__name__].get("required", [])
                    yield _row(name, about, required=required)
            yield ""
        kinds: dict[tuple[type, ...], list[KeyPath]] = {}
        for name in inner:
            kinds.setdefault(tuple(models_at((*path, name))), []).append((*path, name))
        for first, *others in kinds.values():
            yield from _reference(first, definitions, alike=others)


def _row(name: str, about: dict[str, Any], *, required: bool) -> str:
    default = "required" if required else _default(about.get("default"))
    meaning = " ".join(about.get("description", "").split())
    return (
        "| "
        + " | ".join(
            c.replace("|", "\\|") for c in (f"`{name}`", _type(about), default, meaning)
        )
        + " |"
    )


def _default(value: Any) -> str:
    return "unset" if value is None else f"`{format_value(value)}`"


def _type(about: dict[str, Any]) -> str:
    """Return the type of a key in words, from its JSON schema."""
    if "enum" in about or "const" in about:
        return ", ".join(
            f"`{format_value(v)}`" for v in about.get("enum", [about.get("const")])
        )
    if "anyOf" in about:
        return " or ".join(_type(a) for a in about["anyOf"] if a.get("type") != "null")
    kind = about.get("type", "")
    if (plain := {"array": "list", "object": "table"}.get(kind)) and (
        about.get("items", about.get("additionalProperties")) in ({}, True)
    ):
        return plain
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


if __name__ == "__main__":
    for path, content in generated().items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")
