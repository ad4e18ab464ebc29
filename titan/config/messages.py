"""Explanations of pydantic's errors in plain words: the value, the rule, and the nearest fix.

pydantic locates an error by a path that also names union members ("AdamW", "constrained-int"), and reports a failed union as
one error for each member. Here errors are grouped by their key.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import Problem, SourceMap, Table, choose, did_you_mean, foreign, key_text, nearest
from .keys import fields_at, models_at, sections_with
from .toml import BOOLEANS, KeyPath, format_value

# pydantic's error types, and the expected value in words.
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
# pydantic's error types for bounds: name of the limit, and the bound in words.
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(
    error: ValidationError, *, data: Table, source_map: SourceMap
) -> dict[KeyPath, Problem]:
    """Return every mistake that pydantic reports in `data`, by its key, in the order of the keys."""
    # A union reports one error for each member, all for one key.
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_path_in(data, detail), []).append(detail)
    return {
        path: source_map.problem(key_text(path), _message(path, details, data=data))
        for path, details in by_path.items()
    }


def likely_key(path: KeyPath, *, data: Table) -> KeyPath:
    """Return the key that was probably meant. It is `path` itself if that exists, or if no other key is similar."""
    here = fields_at(path[:-1], data=data)
    name = str(path[-1])
    match = None if name in here else nearest(name, here)
    return (*path[:-1], match) if match else path


def _path_in(data: Any, error: ErrorDetails) -> KeyPath:
    """Return the error's location without the names of union members, which are not in the data."""
    path: KeyPath = ()
    # Follow the location into the data as far as it goes.
    for part in error["loc"]:
        inside = part in data if isinstance(data, dict) else isinstance(data, list)
        if inside and isinstance(part, int) == isinstance(data, list):
            data = data[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path += (part,)
    # pydantic points at the table; the mistake is the key that names its kind.
    if error["type"] == "union_tag_invalid":
        path += (error["ctx"]["discriminator"].strip("'"),)
    return path


def _message(path: KeyPath, errors: list[ErrorDetails], *, data: Table) -> str:
    # In a union, a member that rejects only the value gives a better message than a member that rejects the type.
    error = next((e for e in errors if e["type"] not in _WANTED), errors[0])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _WANTED:
        wanted = " or ".join(dict.fromkeys(_WANTED[e["type"]] for e in errors))
        return f"expected {wanted}, got {_describe(value)}{_type_fix(value, wanted, path)}"
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        return f"must be {words} {_number(context[limit])}, got {format_value(value)}"
    if kind == "extra_forbidden":
        return _unknown(path, value, data=data)
    if kind == "missing":
        return f"missing: {key_text(path[:-1])} needs it{_member(value)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        if value in ("float16", "fp16", "half") and "bfloat16" in choices:
            return _FP16
        return _choice(value, choices)
    if kind == "union_tag_invalid":
        registered = re.findall(r"'([^']*)'", context["expected_tags"])
        return f'unknown {path[-2] if path[-1] == "name" else path[-1]} "{context["tag"]}"{choose(context["tag"], registered)}'
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return f"{tag} is missing; write {tag} = and one of {', '.join(_tags(path, tag))}"
    if kind == "finite_number":
        return f"expected a finite number, got {format_value(value)}"
    reason = str(context.get("error", error["msg"]))  # our validator's text, or pydantic's
    return f"{reason[:1].lower()}{reason[1:]}, got {_describe(value)}"


_FP16 = (
    "float16 is for training.mixed_precision_param alone, whose gradients have a loss scale: without one, those below 6e-8 become 0; "
    'use "bfloat16", which has the range of float32'
)


def _describe(value: Any) -> str:
    """Return a value with its type, in plain words."""
    if isinstance(value, str):
        return f"the string {format_value(value)}"
    if isinstance(value, bool):
        return format_value(value)
    if isinstance(value, int | float):
        return f"the number {format_value(value)}"
    if isinstance(value, datetime | date | time):
        return f"the date or time {format_value(value)}"
    return "a list" if isinstance(value, list) else "a table"


def _number(value: float) -> str:
    return format_value(int(value) if float(value).is_integer() else value)


def _type_fix(value: Any, wanted: str, path: KeyPath) -> str:
    """Return a hint about the right value, after a semicolon, or "" if the value does not suggest any."""
    if isinstance(value, str) and "number" in wanted:
        # A number in quotes.
        pattern = r"[+-]?\d+" if "whole" in wanted else r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?"
        return f"; write {value} without quotes" if re.fullmatch(pattern, value) else ""
    if wanted == "a whole number" and isinstance(value, float) and abs(value) < 1e15:
        below = int(value // 1)
        return f"; write {below}" if value == below else f"; write {below} or {below + 1}"
    booleans = BOOLEANS | {"1": True, "0": False}
    if wanted == "true or false" and str(value).lower() in booleans:
        return f"; write {format_value(booleans[str(value).lower()])}"
    if wanted == "text" and not isinstance(value, list | dict):
        return f"; write {format_value(format_value(value))}"
    if wanted == "a table" and isinstance(path[-1], int):  # an item of a list of tables
        return f"; write {{type = {format_value(value)}}}" if isinstance(value, str) else ""
    if wanted == "a table" or (wanted == "a list" and models_at(path)):
        name = f"[{key_text(path)}]" if wanted == "a table" else f"[[{key_text(path)}]]"
        return f"; write {name} and its keys below that line"
    return f"; write [{format_value(value)}]" if wanted == "a list" else ""


def _choice(value: Any, choices: list[str]) -> str:
    match = nearest(value, choices, cutoff=0.5) if isinstance(value, str) else None
    listed = ", ".join(map(format_value, choices))
    hint = f"; did you mean {format_value(match)}?" if match else ""
    return f"expected one of {listed}, got {format_value(value)}{hint}"


def _unknown(path: KeyPath, value: Any, *, data: Table) -> str:
    """Return the message for an unknown key, with a similar key here, or the same key in another section."""
    name, here = str(path[-1]), fields_at(path[:-1], data=data)
    # The key may be correct, and belong to another member of the union.
    if owners := [_tag(model) for model in models_at(path[:-1]) if name in model.model_fields]:
        return (
            f"unknown key; only {', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
        )
    # Otherwise look for a similar key here, then for the same key in another section.
    elsewhere = sections_with(name)
    if len(path) == 1:
        is_table = isinstance(value[0] if isinstance(value, list) and value else value, dict)
        what = "unknown section" if is_table else "key outside any section"
        hint = foreign(name) or (did_you_mean(name, here) if is_table else "")
    else:
        what, hint, near = "unknown key", foreign(name), did_you_mean(name, here, cutoff=0.75)
        # A key of this section is likelier than one of another.
        hint = near if f"{path[0]}." not in hint and near else hint
    if not hint and 0 < len(elsewhere) <= 3:
        hint = f"; did you mean {' or '.join(f'[{section}] {name}' for section in elsewhere)}?"
    if not hint and len(path) > 1:
        hint = did_you_mean(name, here) or f"; there are {', '.join(here)}"
    return what + (hint or f"; there are {', '.join(here)}")


def _tag(model: type[BaseModel]) -> str:
    """Return the key that selects this member of a union: `name = "Muon"`."""
    return next(
        f"{name} = {format_value(field.default)}"
        for name, field in model.model_fields.items()
        if get_origin(field.annotation) is Literal
    )


def _member(table: Any) -> str:
    """Return which member of a union needs a key."""
    kind = table.get("type") if isinstance(table, dict) else None
    return f' for type "{kind}"' if kind else ""


def _tags(path: KeyPath, tag: str) -> list[str]:
    return [
        model.model_fields[tag].default
        for model in models_at(path)
        if tag in model.model_fields
    ]
