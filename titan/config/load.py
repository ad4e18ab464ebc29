"""Job files to a `JobConfig`: TOML, overlays, command-line overrides, old names; every problem at once.

Later wins: job file, overlays from left to right, then `--section.key=value`. Tables are merged key by key;
lists and single values are replaced whole. Each value keeps the file and line it came from (`Origin`), for the
errors here and for the rules of rules.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from .aliases import Layer, modernise
from .messages import explain
from .problems import (
    COMMAND_LINE,
    ConfigError,
    Origin,
    Place,
    Problem,
    collecting,
    did_you_mean,
    key_text,
    parent,
)
from .schema import field_at, sections_with
from .sections import JobConfig
from .toml import parse_value, read_toml

USAGE = "JOB.toml [OVERLAY.toml ...] [--section.key=value ...]"


@dataclass(frozen=True)
class Arguments:
    """A command line, taken apart: files in order, and overrides as "section.key=value"."""

    job: Path
    overlays: tuple[Path, ...]
    overrides: tuple[str, ...]


def load_config(
    job: Path | str, *, overlays: Iterable[Path | str] = (), overrides: Iterable[str] = ()
) -> JobConfig:
    """The config that these files and overrides ("section.key=value") make; raises `ConfigError`.

    Types, names and ranges are checked; how values go together is for `titan.config.rules`. Warnings about
    old names are in the result's `origin.warnings`.
    """
    layers: list[Layer] = []
    problems: list[Problem] = []
    for path in (job, *overlays):
        with collecting(problems):
            layers.append(_read_file(Path(path)))
    with collecting(problems):
        layers.append(_read_overrides(overrides))
    if problems:  # checking the rest would mislead: what the unreadable part sets is unknown
        raise ConfigError(problems)
    origin = Origin(str(job), 1)
    for layer in layers:
        warnings, mistakes = modernise(layer)
        origin.warnings += warnings
        problems += mistakes
    data: dict[str, Any] = {}
    for layer in layers:
        _merge(data, layer.data, places=origin.places, new_places=layer.places)
    try:
        config = JobConfig.model_validate(data)
    except ValidationError as error:
        problems += explain(error, data=data, origin=origin)
    if problems:
        raise ConfigError(problems)
    config._origin = origin
    return config


def load_from_argv(
    argv: Sequence[str], *, options: Sequence[str] = (), warn: bool = True
) -> JobConfig:
    """The config of `JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`; warnings go to stderr, once a run."""
    arguments = parse_args(argv, options=options)
    config = load_config(arguments.job, overlays=arguments.overlays, overrides=arguments.overrides)
    if warn and os.environ.get("RANK", "0") == "0":
        for warning in config.origin.warnings:
            print(warning, file=sys.stderr)
    return config


def parse_args(argv: Sequence[str], *, options: Sequence[str] = ()) -> Arguments:
    """Take a command line apart; raises `ConfigError`.

    `--section.key value` and, for a boolean, `--section.key` alone are understood too. `options` are
    those the calling command understands besides, for the hint at a misspelt one.
    """
    files: list[str] = []
    overrides: list[str] = []
    problems: list[Problem] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not word.startswith("-"):
            files.append(word)
        elif not key.startswith("--") or "." not in key:
            problems.append(
                Problem(COMMAND_LINE, 0, key, f"unknown option{_option_hint(key, options)}")
            )
        else:
            overrides.append(f"{key[2:]}={value if equals else _take_value(key[2:], rest)}")
    problems += [
        Problem(COMMAND_LINE, 0, word, f"not a file; did you mean --{word}?")
        for word in files
        if "=" in word and not Path(word).exists()
    ]
    if not files:
        problems.append(Problem(COMMAND_LINE, 0, "", f"no job file; expected {USAGE}"))
    if problems:
        raise ConfigError(problems)
    return Arguments(Path(files[0]), tuple(map(Path, files[1:])), tuple(overrides))


def _take_value(key: str, rest: list[str]) -> str:
    """The value of `--section.key value`: the next word, unless a boolean stands alone."""
    field = field_at(tuple(key.split(".")))
    alone = field is not None and field.annotation is bool and rest[:1] not in (["true"], ["false"])
    if alone or not rest or rest[0].startswith("--"):
        return "true"
    return rest.pop(0)


def _option_hint(option: str, options: Sequence[str]) -> str:
    name = option.lstrip("-")
    if sections := sections_with(name):
        return f"; did you mean {' or '.join(f'--{section}.{name}' for section in sections)}?"
    if name in JobConfig.model_fields:
        return f"; did you mean --{name}.KEY=VALUE?"
    return did_you_mean(option, options)


def _read_file(path: Path) -> Layer:
    data, lines = read_toml(path)
    places = {}
    for key_path, line in lines.items():
        key = key_text(key_path)
        places[key] = Place(str(path), line, key)
    return Layer(data, places)


def _read_overrides(overrides: Iterable[str]) -> Layer:
    layer = Layer({}, {})
    problems: list[Problem] = []
    for override in overrides:
        key, _, text = override.lstrip("-").partition("=")
        *tables, name = key.split(".")
        around = layer.data
        for table in tables:
            inner = around.setdefault(table, {})
            around = inner if isinstance(inner, dict) else {}
        if not all((*tables, name)) or "[" in key:
            problems.append(
                Problem(COMMAND_LINE, 0, key, "not a key; expected --section.key=value")
            )
        around[name] = _override_value(key, text)
        while key:
            layer.places[key] = Place(COMMAND_LINE, 0, key)
            key = parent(key)
    if problems:
        raise ConfigError(problems)
    return layer


def _override_value(key: str, text: str) -> Any:
    """`text` as TOML, else as it stands; for a key that holds text, as it stands unless quoted."""
    field = field_at(tuple(key.split(".")))
    annotation = field.annotation if field else None
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    is_text = field is not None and all(
        m in (str, type(None)) or get_origin(m) is Literal for m in members
    )
    try:
        value = parse_value(text)
    except ValueError:
        return text
    return text if is_text and not isinstance(value, str) else value


def _merge(
    base: dict[str, Any],
    top: dict[str, Any],
    *,
    places: dict[str, Place],
    new_places: dict[str, Place],
    around: tuple[str, ...] = (),
) -> None:
    """Lay `top` over `base`, in place; tables that both have keep the place of the first."""
    for name, value in top.items():
        path = (*around, name)
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value, places=places, new_places=new_places, around=path)
            continue
        base[name] = value
        key = key_text(path)
        for old in [k for k in places if _is_within(k, key)]:
            del places[old]
        places.update({k: place for k, place in new_places.items() if _is_within(k, key)})


def _is_within(key: str, table: str) -> bool:
    return key == table or key.startswith((f"{table}.", f"{table}["))
