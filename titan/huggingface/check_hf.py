"""Command `titan check --hf FOLDER`, which shows the family of a Hugging Face folder in titan, and whether its weights load.

`titan init --hf FOLDER` writes the same keys into a job.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError, is_there, printable, read_json, root_of
from titan.checkpoint import CheckpointError
from titan.config.errors import ConfigError, Problem, hub_fix
from titan.config.options import put_json
from titan.config.toml import format_value
from titan.data.tokenizer import tokenizer_named
from titan.data.tokenizer_files import tokenizer_files

from .hf_model import hooks_of, unread_keys
from .load import (
    CONFIG,
    INDEX,
    SINGLE,
    HFFolder,
    HFModel,
    model_keys,
    open_folder,
    read_sizes,
    require_weights_for,
    tensor_problems,
)

_MAX_PARAMS = 2**50
_SHOWN = 5


def describe(path: Path) -> dict[str, Any]:
    """Return the facts that `titan check --hf --json` prints.

    Args:
        path: a config.json, or its folder.

    Raises:
        InputError: the folder holds no model of titan's families.
    """
    file = path / CONFIG if path.is_dir() else path
    # Fetch nothing unasked: the machine may have no network.
    if not file.exists() and (fix := hub_fix(str(path))):
        enough = f"; its {CONFIG} is enough for titan check"
        raise InputError(f"{path}: no such file or folder{fix}{enough}")
    hf = read_json(file, dict[str, Any], limit=2**20, within=root_of(file.parent))
    try:
        name, sizes = read_sizes(HFFolder(file.parent, hf, {}))
        keys = model_keys(name, sizes, path)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{file.parent / CONFIG}: ")
        raise InputError(f"{file}: {reason}") from error
    except ConfigError as error:
        reasons = "; ".join(f"{p.key}: {p.message}" for p in error.problems)
        raise InputError(f"{file}: {reasons}") from error
    if not 0 < sizes.num_params < _MAX_PARAMS:
        raise InputError(f"{file}: means {sizes.num_params:.3g} parameters, which no model has")
    loads, problems, where = None, [], str(file.parent)
    hooks: Any = hooks_of(name)
    unread = unread_keys(file, hf, hooks, sizes)
    has_tokenizer = bool(tokenizer_files(where))
    if file.name == CONFIG and (
        is_there(file.parent / INDEX) or is_there(file.parent / SINGLE)
    ):
        problems = _problems(file.parent, name, sizes)
        with suppress(InputError):  # there is no tokenizer that titan can read
            tokenizer = tokenizer_named(where)
            unread += tokenizer.unread
            if (tokens := tokenizer.vocab_size) > sizes.vocab_size:
                problems.append(
                    f"its tokenizer has {tokens:,} tokens, and the model {sizes.vocab_size:,}"
                )
        loads = not problems
    return {
        "config": str(file),
        "parameters": sizes.num_params,
        "active_parameters": sizes.num_active_params,
        "family": keys,
        "tokenizer": {"path": where} if has_tokenizer else {},
        "loads": loads,
        "problems": problems,
        "unread": unread,
    }


def job_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a job that continues a folder's model.

    Raises:
        InputError: the folder lacks weights or a tokenizer, or titan cannot load them.
    """
    facts = describe(path)
    if not facts["loads"] or not facts["tokenizer"]:
        fetch = "`hf download NAME --local-dir FOLDER` fetches all files of a model"
        missing = f"its weights or its tokenizer are missing; {fetch}"
        raise InputError(f"{path}: {[*facts['problems'], missing][0]}")
    return _sections(facts)


def _sections(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    start = {
        "initial_load_path": str(Path(facts["config"]).parent),
        "initial_load_in_hf": True,
        "last_save_in_hf": True,
    }
    found = {
        "model": facts["family"],
        "tokenizer": facts["tokenizer"],
        "checkpoint": start if facts["loads"] else {},
    }
    return {name: section for name, section in found.items() if section}


def _problems(folder: Path, name: str, sizes: Any) -> list[str]:
    """Return a line for each tensor that differs between the files and the model."""
    try:
        opened = open_folder(folder)
        require_weights_for(sizes, opened)
        return [*tensor_problems(opened, HFModel.of(name, sizes).spelled_as(opened.files))]
    except CheckpointError as error:
        return [str(error)]


def main(options: Namespace) -> int:
    """Run `titan check --hf`. Return the exit code."""
    try:
        facts = describe(options.hf)
    except InputError as error:
        problem = Problem(str(options.hf), 0, "", str(error))
        if put_json({"problems": [asdict(problem)]}, options.json):
            return 2
        raise
    if not put_json(facts, options.json):
        for name, text in _rows(facts):
            print(f"{name:<12}{printable(text, 400)}".rstrip())
    return 0


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    keys, problems = facts["family"], facts["problems"]
    total, active = facts["parameters"], facts["active_parameters"]
    experts = f", {active:,} of them active for a token" if active != total else ""
    yield "parameters", f"{total:,}{experts}"
    yield "family", f"{keys['name']}. In a job file:"
    for name, section in _sections(facts).items():
        yield "", f"    [{name}]"
        yield from [("", f"    {key} = {format_value(v)}") for key, v in section.items()]
    verdicts = {None: f"no weights are beside {facts['config']}", True: "yes", False: "no"}
    yield "loads", verdicts[facts["loads"]]
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    yield from [("", line) for line in [*problems[:_SHOWN], *more]]
    yield from [("note", line) for line in facts["unread"]]
