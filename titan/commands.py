"""Commands of `titan`, as data. Imports no large package: `titan --help` reads all of it.

An installed package adds commands through the entry point group `titan.commands` (titan/config/plug_ins.py). titan's own
commands keep their names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.config.plug_ins import load_plug_in, plug_ins

COMMANDS: dict[str, tuple[str, str]] = {
    # name: its line in `titan --help`, and the function, whose module is imported when it runs
    "init": ("write a commented job file to start from", "titan.tools.shipped:init"),
    "configs": ("list the jobs that come with titan, or copy one", "titan.tools.shipped:main"),
    "train": (
        "train a model: one process per accelerator, one on a CPU, or --nproc N",
        "titan.cli:train",
    ),
    "check": (
        "check a job for a number of ranks: layout and memory; with --hardware also if it fits; --hf: a Hugging Face folder",
        "titan.tools.check:main",
    ),
    "sim": (
        "predict time and memory of a step on some hardware, without a GPU",
        "titan.sim.cli:main",
    ),
    "autosac": (
        "choose what each block keeps and what it recomputes",
        "titan.sim.search.autosac:main",
    ),
    "plan": (
        "find the fastest layouts of a job that fit, as TOML overlays",
        "titan.sim.search.plan:main",
    ),
    "slurm": (
        "check a job, write its script for sbatch, and submit it",
        "titan.ops.cluster.slurm:main",
    ),
    "config": ("print the resolved job as TOML", "titan.cli:config"),
    "schema": ("print the JSON schema of job files, for editors", "titan.cli:schema"),
    "prepare": ("tokenize text into memory-mapped shards", "titan.tools.prepare:main"),
    "tokenizer": ("train or inspect a tokenizer", "titan.tools.tokenizer:main"),
    "plot": ("draw loss and throughput curves of runs", "titan.tools.plot:main"),
    "profile": (
        "read a profiler trace: where a step's time went, by kind of work and by module",
        "titan.tools.profile:main",
    ),
    "certify": (
        "prove on CPU ranks that a job computes the same in each layout, before GPUs",
        "titan.numerics.certify.command:main",
    ),
    "diff": (
        "find the first module that computes something else in another layout, precision or version",
        "titan.numerics.diff.command:main",
    ),
    "audit": (
        "compute a step of a finished run again, and name what differs from its metrics and its checkpoint",
        "titan.numerics.diff.audit:main",
    ),
    "pipeline": (
        "draw a job's pipeline schedule, with its bubble and activations in flight",
        "titan.tools.pipeline:main",
    ),
    "doctor": (
        "explain what happened to a run: which rank, which collective, which line, what to do",
        "titan.ops.doctor.cli:main",
    ),
    "preflight": (
        "before a run: check devices, links, disks and versions of all ranks, then try a step",
        "titan.ops.preflight.cli:main",
    ),
    "verify": ("check a checkpoint and name any damaged file", "titan.tools.verify:main"),
    "convert": (
        "Hugging Face folders to checkpoints, and back",
        "titan.huggingface.convert:main",
    ),
    "generate": ("sample text from a checkpoint", "titan.tools.generate:main"),
    "completion": (
        "let the shell complete commands, files and keys",
        "titan.tools.completion:main",
    ),
}


def command_names() -> list[str]:
    """Return the names of titan's commands, then the names of commands that packages add."""
    return [*(name for name in COMMANDS if not missing_part(name)), *_added()]


@cache
def missing_part(name: str) -> str:
    """Return the folder of one of titan's own commands, such as "titan/sim", if it is not installed. Else ""."""
    if name not in COMMANDS:
        return ""
    part = ".".join(COMMANDS[name][1].partition(":")[0].split(".")[:2])
    found = find_spec(part)
    return "" if found and found.origin else part.replace(".", "/")


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function behind a command.

    Args:
        name: Name of the command.

    Raises:
        KeyError: There is no such command.
        ConfigError: The package that adds it cannot be imported.
    """
    if name not in COMMANDS:
        return load_plug_in(_added()[name])
    module, _, function = COMMANDS[name][1].partition(":")
    return getattr(import_module(module), function)


def summary_of(name: str) -> str:
    """Return a command's line in `titan --help`. For a command that a package adds, this imports its module."""
    if name in COMMANDS:
        return COMMANDS[name][0]
    try:
        return _first_line(_added()[name].load())
    except Exception as error:  # help must not fail because of a package
        return f"cannot be loaded: {type(error).__name__}: {error}"


def _first_line(function: Any) -> str:
    line = (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _added() -> dict[str, EntryPoint]:
    entries = plug_ins("titan.commands")
    return {entry.name: entry for entry in entries if entry.name not in COMMANDS}


def prepare_process() -> str:
    """Open /dev/null for standard streams that a daemon did not give: a file opened later would get their text.

    Returns:
        Why no command can run here, or "".
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    try:
        Path.cwd()
    except OSError:
        return "the current folder does not exist any more; cd into another one"
    return ""
