"""What the manifests of all schedulers are made from: a job that was checked for its number of ranks, and options that they share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.config.errors import COMMAND_LINE, ConfigError, Problem
from titan.config.load import parse_args
from titan.config.rules import load_to_run
from titan.config.schema import JobConfig

# Datasets, and sources, that are read through `datasets` or pyarrow.
_HUGGING_FACE = {"huggingface", "parquet", "c4", "c4_validation", "fineweb-edu"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A job and its place: `nodes` times `ranks_per_node` ranks, on `gpus_per_node` GPUs each, 0 on CPUs."""

    config: JobConfig
    words: list[str]  # its files and overrides, as given
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    max_restarts: int

    @property
    def name(self) -> str:
        """Of the job file, such that every scheduler takes it: letters, digits and dashes, a letter first."""
        stem = Path(parse_args(self.words).job).stem.lower()
        name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].rstrip("-")
        return name if name[:1].isalpha() else f"titan-{name}".rstrip("-")

    @property
    def run_folder(self) -> Path:
        return Path(self.config.job.dump_folder).absolute()

    @property
    def extras(self) -> list[str]:
        """Return the extras of titan-pretrain that the job needs."""
        config = self.config
        kinds = {config.training.dataset, config.validation.dataset}
        kinds |= {source.type for source in config.data.sources}
        reads_hub = any("/" in kind for kind in kinds) or bool(kinds & _HUGGING_FACE)
        tokenizer = config.tokenizer.path or config.model.hf_assets_path
        has_tokenizer = bool(tokenizer) and config.tokenizer.name not in ("bytes", "tiktoken")
        checkpoint = config.checkpoint
        exports = checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf
        needed = {
            "huggingface": reads_hub or has_tokenizer or exports,
            "float8": bool(config.model.converters),
            "tensorboard": config.metrics.enable_tensorboard,
            "wandb": config.metrics.enable_wandb,
        }
        return [name for name, is_needed in needed.items() if is_needed]

    def relative_inputs(self) -> dict[str, str]:
        """Return the relative paths that the job reads, by their keys."""
        config = self.config
        found = {
            "tokenizer.path": config.tokenizer.path,
            "model.hf_assets_path": config.model.hf_assets_path,
            "training.dataset_path": config.training.dataset_path,
            "validation.dataset_path": config.validation.dataset_path,
            "checkpoint.initial_load_path": config.checkpoint.initial_load_path,
        }
        for number, source in enumerate(config.data.sources):
            is_local = source.type != "huggingface"
            found[f"data.sources.{number}.path"] = getattr(source, "path", "") if is_local else ""
        is_relative = re.compile(r"(?!/|~|\w+://).+")
        return {key: path for key, path in found.items() if path and is_relative.match(path)}

    @property
    def notice_s(self) -> int:
        """Before it is killed, a job has to be told this long: the time that it may take to save, and a minute to spare."""
        return self.config.fault_tolerance.grace_seconds + 60


def parser(command: str, *, summary: str, options: str) -> argparse.ArgumentParser:
    """With the options of every scheduler; it leaves the job's files and overrides alone."""
    made = argparse.ArgumentParser(
        prog=f"titan {command}",
        usage=f"titan {command} JOB.toml [OVERLAY.toml ...] [--section.key=value ...] --nodes N [--gpus-per-node G] {options}",
        description=summary,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="machines")
    add("--gpus-per-node", type=int, default=8, metavar="G", help="default: 8; 0: on CPUs")
    add("--ranks-per-node", type=int, metavar="R", help="default: one per GPU; one on CPUs")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="times to go on after a crash; default: 0",
    )
    add("--output", type=Path, metavar="FILE", help="where to write it")
    return made


def gather(options: argparse.Namespace, job: Sequence[str]) -> Facts:
    """The facts; raises ConfigError with everything that is wrong with options and job."""
    limits = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1, "max_restarts": 0}
    problems = [
        option_problem(
            name.replace("_", "-"), f"expected a whole number of at least {low}, got {value}"
        )
        for name, low in limits.items()
        if (value := getattr(options, name)) is not None and value < low
    ]
    if problems:
        raise ConfigError(problems)
    known = [f"--{name.replace('_', '-')}" for name in vars(options)]
    ranks = options.ranks_per_node or options.gpus_per_node or 1
    config, _ = load_to_run(job, world_size=options.nodes * ranks, options=known)
    return Facts(
        config=config,
        words=list(job),
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks_per_node=ranks,
        max_restarts=options.max_restarts,
    )


def option_problem(name: str, message: str) -> Problem:
    return Problem(COMMAND_LINE, 0, f"--{name}", message)


def require(name: str, value: str | None, *, pattern: str, example: str) -> None:
    """Raises ConfigError unless an option's value, if it has one, is like the pattern."""
    if value is not None and not re.fullmatch(pattern, value):
        raise ConfigError([option_problem(name, f"expected such as {example}, got {value!r}")])


def volumes(given: Sequence[str]) -> list[tuple[str, str]]:
    """Source and path of each SOURCE:/PATH."""
    for text in given:
        require("volume", text, pattern=r"[^:\s].*:/[^:]*", example="checkpoints:/checkpoints")
    return [(source, path) for source, _, path in (text.rpartition(":") for text in given)]
