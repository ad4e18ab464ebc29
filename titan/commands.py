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

from titan.base.signals import die_with_launcher
from titan.config.plug_ins import load_plug_in, plug_ins

COMMANDS: dict[str, tuple[str, str]] = {
    # name: its line in `titan --help`, and the function, whose module is imported when it runs
    "init": (
        "write a job file to start from: for your text, or for a Hugging Face folder",
        "titan.tools.shipped:init",
    ),
    "config": (
        "show all keys of a job, the jobs that come with titan, or the schema for editors",
        "titan.tools.config:main",
    ),
    "completion": (
        "let the shell complete commands, files and keys",
        "titan.tools.completion:main",
    ),
    "prepare": ("turn text into files of tokens", "titan.tools.prepare:main"),
    "tokenizer": ("train or inspect a tokenizer", "titan.tools.tokenizer:main"),
    "train": (
        "train a model: one process per accelerator, one on a CPU, or --nproc N",
        "titan.cli:train",
    ),
    "slurm": (
        "check a job, write its script for sbatch, and submit it",
        "titan.ops.cluster.slurm:main",
    ),
    "preflight": (
        "before a run: check devices, links, disks and versions of all ranks, then try a step",
        "titan.ops.preflight.cli:main",
    ),
    "plot": ("draw loss and throughput curves of runs", "titan.tools.plot:main"),
    "doctor": (
        "explain what happened to a run: which rank, which collective, which line, what to do",
        "titan.ops.doctor.cli:main",
    ),
    "profile": (
        "read a profiler trace: where a step's time went, by kind of work and by module",
        "titan.tools.profile:main",
    ),
    "convert": (
        "turn Hugging Face folders into checkpoints, and back",
        "titan.huggingface.convert:main",
    ),
    "verify": ("check a checkpoint and name any damaged file", "titan.tools.verify:main"),
    "generate": (
        "sample text from a checkpoint, or chat with it",
        "titan.tools.generate:main",
    ),
    "check": (
        "find the mistakes in a job, and tell its layout, its memory, and whether it fits --hardware",
        "titan.tools.check:main",
    ),
    "sim": (
        "predict time and memory of a step on some hardware, without a GPU; draw its pipeline",
        "titan.sim.cli:main",
    ),
    "plan": (
        "find the fastest layouts of a job that fit, or the best recomputation, as TOML overlays",
        "titan.sim.search.plan:main",
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
    "swap": (
        "prove that a run may go on as another job: another torch, layout or precision; and hand it over",
        "titan.numerics.swap.command:main",
    ),
}
GROUPS = {
    "begin": ("init", "config", "completion"),
    "data": ("prepare", "tokenizer"),
    "run": ("train", "slurm", "preflight", "watch", "plot", "doctor", "profile"),
    "model files": ("convert", "average", "verify", "generate", "evaluate"),
    "predict": ("check", "sim", "plan"),
    "trust": ("certify", "diff", "audit", "swap"),
    "study": ("sweep", "compare", "scaling", "budget"),
}
"""Commands in the order of `titan --help`. Those that titan/contrib adds have their places, too."""
ALIASES = {
    "eval": ("evaluate",),
    "export": ("convert", "to-hf"),
    "import": ("convert", "from-hf"),
    "chat": ("generate", "--interactive"),
    "schema": ("config", "--schema"),
}
"""Other words for titan's commands, mostly of other programs."""
GONE = {
    "version": "write `titan --version`",
    **dict.fromkeys(
        ("lora", "sft", "finetune", "serve"),
        "titan has no LoRA and no server; `titan train` fine-tunes all weights on conversations: docs/data.md",
    ),
}
"""Advice about commands that titan does not have."""


def command_groups() -> dict[str, list[str]]:
    """Return the names of all commands, by the groups of `titan --help`. The last one has what other packages add."""
    known = {*(name for name in COMMANDS if not missing_part(name)), *_added()}
    groups = {title: [n for n in names if n in known] for title, names in GROUPS.items()}
    named = [name for names in groups.values() for name in names]
    return groups | {"of other packages": sorted(known - {*named})}


def command_names() -> list[str]:
    """Return the names of all commands, in the order of `titan --help`."""
    return [name for names in command_groups().values() for name in names]


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

    It also lets this process end with titan's, or torchrun's, that has started it.

    Returns:
        Why no command can run here, or "".
    """
    die_with_launcher()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    try:
        Path.cwd()
    except OSError:
        return "the current folder does not exist any more; cd into another one"
    return ""
