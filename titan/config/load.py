"""Loading of job files into a `JobConfig`: TOML, overlays, command-line overrides and old names.

All problems are reported at once. Later values win: job file, overlays from left to right, then `--section.key=value`. Tables
are merged key by key; lists and single values are replaced as a whole. The config remembers the file and line of each value
(`SourceMap`), for the errors found here and for the rules of rules.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titan.base.run_folder import CONFIG, ENVIRONMENT
from titan.base.untrusted import MAX_TEXT, printable

from .errors import (
    COMMAND_LINE,
    ConfigError,
    KeyPath,
    Problem,
    SourceLocation,
    SourceMap,
    Table,
    did_you_mean,
    foreign,
    key_text,
    parent,
    readable,
)
from .keys import field_at, sections_with
from .layer import ConfigLayer, LoadExtension, is_within, last
from .messages import explain, likely_key
from .plug_ins import parts_of
from .schema import JobConfig
from .toml import parse_value, read_toml

USAGE = "JOB.toml [OVERLAY.toml ...] [--section.key=value ...]"


@dataclass(frozen=True)
class Arguments:
    """Parts of a command line.

    Attributes:
        job: the job file.
        overlays: files whose keys replace those of the job file.
        overrides: texts "section.key=value", which replace both.
    """

    job: Path
    overlays: tuple[Path, ...]
    overrides: tuple[str, ...]


# ---- files -------------------------------------------------------------------------------------


def load_config(
    job: Path | str,
    *,
    overlays: Iterable[Path | str] = (),
    overrides: Iterable[str] = (),
    of_run: bool = False,
) -> JobConfig:
    """Load the config of some files and overrides.

    Types, names and ranges are checked here. `titan.checks.rules` checks how values fit together. Warnings about old names
    are in the result's `source_map.warnings`.

    Args:
        job: the job file.
        overlays: files whose keys replace those of the job file.
        overrides: "section.key=value", which replace both.
        of_run: the job file was written by a run. Keys that only the titan of that run has are left out, with a warning. This is
            also so for a config.toml in a run folder.

    Raises:
        ConfigError: a file cannot be read, or a value is wrong.
    """
    # Each file is read and modernized separately, so that every problem has its own file and line.
    problems: list[Problem] = []
    # All files are read before any report, so that one report has all mistakes.
    layers = [readable(problems, _read_file, Path(path)) for path in (job, *overlays)]
    layers.append(readable(problems, _read_overrides, overrides))
    # The settings of the unreadable part are unknown, so other errors could mislead.
    if problems:
        raise ConfigError(problems)
    source_map = SourceMap(str(job), 1)
    merged: Table = {}
    extensions = [*parts_of(LoadExtension)]
    for layer in filter(None, layers):
        for extension in extensions:
            warnings, mistakes = extension.rename(layer)
            source_map.warnings += warnings
            problems += mistakes
        for key in _merge(merged, layer.data):
            # A list or value is replaced as a whole, so its old locations go too.
            old, new = source_map.locations, layer.locations
            kept = {k: place for k, place in old.items() if not is_within(k, key)}
            source_map.locations = kept | {k: v for k, v in new.items() if is_within(k, key)}
    for extension in extensions:
        warnings = readable(problems, extension.complete, merged, source_map.locations)
        source_map.warnings += warnings or []
    of_run = of_run or _is_in_run_folder(Path(job))
    config, mistakes = _validate(merged, source_map, of_run=of_run)
    if of_run:
        unread = [m for m in mistakes if m.file == str(job) and _field(m.key) is None]
        mistakes = [m for m in mistakes if m not in unread]
        if unread:
            names = ", ".join(m.key for m in unread)
            source_map.warnings.append(
                f"{job}: this titan has no such keys, so they are not read: {names}"
            )
    if problems := problems + mistakes:
        raise ConfigError(problems, partial=config)
    return config


def _read_file(path: Path) -> ConfigLayer:
    """Return the settings of a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    data, lines = read_toml(path)
    if path.parent.resolve() != Path.cwd() and not _is_in_run_folder(path):
        data = _paths_beside(data, path.parent)
    keys = {key_text(key_path): line for key_path, line in lines.items()}
    locations = {key: SourceLocation(str(path), line, key) for key, line in keys.items()}
    return ConfigLayer(data, locations)


def _paths_beside(value: Any, folder: Path, name: str = "") -> Any:
    """Return a file's values with absolute paths for those that lie beside the file.

    Args:
        value: a table, or the value of a key in it.
        folder: folder of the file.
        name: the key.
    """
    if isinstance(value, dict):
        return {key: _paths_beside(inner, folder, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_paths_beside(inner, folder, name) for inner in value]
    if isinstance(value, str) and name.endswith("path"):
        # Absolute paths and addresses are no patterns, and an empty one is none.
        with suppress(NotImplementedError, ValueError, OSError, LookupError):
            if any(folder.glob(value)):
                return str(folder.resolve() / value)
    return value


def _is_in_run_folder(job: Path) -> bool:
    return job.name == CONFIG and (job.parent / ENVIRONMENT).exists()


def _field(key: str) -> FieldInfo | None:
    return field_at(tuple(key.split(".")))


def _merge(base: Table, top: Table, path: KeyPath = ()) -> Iterator[str]:
    """Merge `top` into `base`. Yield each key whose value is new."""
    for name, value in top.items():
        inner = (*path, name)
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            yield from _merge(base[name], value, inner)
        else:
            base[name] = value
            yield key_text(inner)


def _validate(
    data: Table, source_map: SourceMap, *, of_run: bool
) -> tuple[JobConfig, list[Problem]]:
    """Return the config and its mistakes. A wrong setting becomes unknown, so that no rule depends on it."""
    mistakes: dict[KeyPath, Problem] = {}
    unknown: list[KeyPath] = []
    try:
        config = JobConfig.model_validate(data)
    except ValidationError as error:
        mistakes = explain(error, data=data, source_map=source_map)
        # A misspelt key leaves the value of the key that was meant unknown. A run misspells none.
        wrong = [path for path in mistakes if not of_run or field_at(path) is not None]
        unknown += [_whole(likely_key(path, data=data)) for path in wrong]
        # Validate the rest again, to get a config that rules can check.
        for path in mistakes:
            _remove(data, _whole(path))
        try:
            config = JobConfig.model_validate(data)
        except ValidationError:  # the rest is not valid either: every value is unknown
            config = JobConfig()
            unknown = [(name,) for name in JobConfig.model_fields]
    # Tables before their keys: forgetting a table makes the keys unreachable.
    for path in sorted(unknown, key=len):
        config.forget(path)
    config._source_map = source_map
    return config, [*mistakes.values()]


def _whole(path: KeyPath) -> KeyPath:
    """Return the path of everything that a mistake makes unusable.

    This is a list with all its items, or a table that lacks a required key or the key that names its kind.
    """
    path = tuple(takewhile(lambda part: isinstance(part, str), path))
    field = field_at(path)
    if field is None:
        return path
    is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return path[:-1] if is_tag or field.is_required() else path


def _remove(data: dict[Any, Any], path: KeyPath) -> None:
    *tables, name = path
    for table in tables:
        data = data[table] if isinstance(data.get(table), dict) else {}
    data.pop(name, None)


# ---- command lines -----------------------------------------------------------------------------


def load_from_argv(
    argv: Sequence[str], *, options: Sequence[str] = (), warn: bool = True
) -> JobConfig:
    """Load the config of `JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`; see `parse_args`.

    Args:
        argv: files and overrides.
        options: the command's other options, for the hint at a misspelt option.
        warn: print warnings about old names.

    Raises:
        ConfigError: the command line, a file or a value is wrong.
    """
    problems: list[Problem] = []
    arguments = readable(problems, parse_args, argv, options=options)
    config = None
    if arguments is not None:
        overlays, overrides = arguments.overlays, arguments.overrides
        config = readable(
            problems, load_config, arguments.job, overlays=overlays, overrides=overrides
        )
    if problems or config is None:
        raise ConfigError(problems, partial=config)
    if warn:
        print_warnings(config.source_map.warnings)
    return config


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(printable(warning, MAX_TEXT), file=sys.stderr)


def parse_args(argv: Sequence[str], *, options: Sequence[str] = ()) -> Arguments:
    """Split a command line into its parts.

    Args:
        argv: files and overrides. `--section.key value` is understood too, and `--section.key` alone for a boolean.
        options: the command's other options, for the hint at a misspelt option.

    Raises:
        ConfigError: an option is unknown, or there is no job file. Its `partial` is the parts that
            could be read, or None without a job file.
    """
    files: list[str] = []
    overrides: list[str] = []
    problems: list[Problem] = []
    rest = list(argv)
    # Word by word, since one word may be the value of another.
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        # A file, or an override without its dashes.
        if not word.startswith("-"):
            if equals and not Path(word).exists():
                problems.append(
                    Problem(COMMAND_LINE, 0, word, f"not a file; did you mean --{word}?")
                )
            else:
                files.append(word)
        elif key == "--job.config_file":  # TorchTitan's name for the job file
            files.append(value or _take_value(key[2:], rest))
        # Only overrides have a dot. Other options belong to the command, which has already taken its own.
        elif not key.startswith("--") or "." not in key:
            hint = _option_hint(key, options)
            problems.append(Problem(COMMAND_LINE, 0, key, f"unknown option{hint}"))
            if not equals and rest and not rest[0].startswith("-") and ".toml" not in rest[0]:
                rest.pop(0)  # its value
        else:
            overrides.append(f"{key[2:]}={value if equals else _take_value(key[2:], rest)}")
    if not files:
        problems.append(Problem(COMMAND_LINE, 0, "", f"no job file; expected {USAGE}"))
        raise ConfigError(problems)
    job, *overlays = map(Path, files)
    arguments = Arguments(job, tuple(overlays), tuple(overrides))
    if problems:
        raise ConfigError(problems, partial=arguments)
    return arguments


def _take_value(key: str, rest: list[str]) -> str:
    """Return the value of `--section.key value`: the next word, unless a boolean stands alone."""
    field = _field(key)
    is_bool = field is not None and field.annotation is bool
    is_alone = is_bool and rest[:1] not in (["true"], ["false"])
    if is_alone or not rest or rest[0].startswith("--"):
        return "true"
    return rest.pop(0)


_RANKS = (
    "--gpus-per-node",
    "--nproc",
    "--world-size",
    "--nproc-per-node",
    "--gpus",
    "--num-gpus",
    "--ranks",
)


def _option_hint(option: str, options: Sequence[str]) -> str:
    name = option.lstrip("-").replace("-", "_")
    if sections := sections_with(name):
        return f"; did you mean {' or '.join(f'--{section}.{name}' for section in sections)}?"
    if name == "phase":
        return "; write [[phase]] and its keys below that line into a TOML file"
    if name in JobConfig.model_fields:
        return f"; did you mean --{name}.KEY=VALUE?"
    # One command starts the ranks. The others need only their number.
    counts = [other for other in options if other in _RANKS]
    if counts and option.replace("_", "-") in _RANKS:
        of_node = "--gpus-per-node"  # beside --nodes
        return f"; here {of_node if of_node in options else counts[0]} says how many ranks there are"
    return foreign(option, options) or did_you_mean(option, options)


def _read_overrides(overrides: Iterable[str]) -> ConfigLayer:
    # Overrides become tables like a file's, so they are merged in the same way.
    layer = ConfigLayer({}, {})
    problems: list[Problem] = []
    for override in overrides:
        key, _, text = override.lstrip("-").partition("=")
        if not all(key.split(".")) or "[" in key:
            message = "not a key; expected --section.key=value"
            problems.append(Problem(COMMAND_LINE, 0, key, message))
        # An override below a plain value finds no table. Validation reports it.
        layer.table_of(key, create=True)[last(key)] = _override_value(key, text)
        # The tables around it too, for problems with a key that is missing there.
        while key:
            layer.locations[key] = SourceLocation(COMMAND_LINE, 0, key)
            key = parent(key)
    if problems:
        raise ConfigError(problems)
    return layer


def _override_value(key: str, text: str) -> Any:
    """Return `text` as a TOML value if it is valid, otherwise as a string. A key of type text needs no quotes."""
    try:
        value = parse_value(text)
    except ValueError:
        return text  # unquoted text, as a shell leaves it
    field = _field(key)
    if field is None or isinstance(value, str):
        return value
    is_union = get_origin(field.annotation) in (Union, UnionType)
    members = get_args(field.annotation) if is_union else (field.annotation,)
    texts = (m in (str, type(None)) or get_origin(m) is Literal for m in members)
    return text if all(texts) else value


def leaves_layout_open(job: Sequence[str]) -> bool:
    """Return whether a job has `parallelism.layout = "auto"`. Mistakes in it are reported later."""
    try:
        return load_from_argv(job, warn=False).parallelism.layout == "auto"
    except ConfigError:
        return False
