"""Sample text from a checkpoint on one process, as a sanity check of a run (`titan generate`).

Sampling uses a temperature and top-k. The inner attention of each block is replaced from outside by one that caches keys and
values (titan.models.attention.CachedAttention), so each new token costs one position.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from titan.checkpoint.commit import TITAN_JSON
from titan.checkpoint.manager import (
    CheckpointError,
    CheckpointManager,
    load,
    model_state,
    read_metadata,
)
from titan.checkpoint.manifest import METADATA
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.storage import Location, as_location, join, storage_of
from titan.checkpoint.tensors import reason
from titan.checks.machine import open_tokenizer
from titan.config.errors import COMMAND_LINE, ConfigError, Problem
from titan.config.load import load_config
from titan.config.model import family, model_config
from titan.config.schema import CheckpointSection, JobConfig
from titan.data import DataError
from titan.data.tokenizer import Tokenizer
from titan.data.tokenizer_files import with_tokenizer
from titan.models.attention import CachedAttention, InnerAttention
from titan.parallel import materialize

TOKENIZER_OPTION: dict[str, Any] = {
    "default": "",
    "metavar": "PATH",
    "help": "a tokenizer's file or folder, or \"bytes\"; default: the run folder's copy",
}


def find_checkpoint(where: Location, *, tokenizer: str = "") -> tuple[JobConfig, Location]:
    """Return the job and the checkpoint that a location means. Raises CheckpointError if it is damaged or missing.

    Args:
        where: a run folder or a folder of checkpoints, which mean the newest whole step; or a step.
        tokenizer: the path of a tokenizer for the job; "": the copy in the run folder, or else what the job names.
    """
    config, folder, run_dir = None, where, None
    # The run folder is the folder itself, or above checkpoint/step-N. A URL has none.
    # The config beside the checkpoint is that of the run that wrote it.
    for run in (where, *where.absolute().parents[:2]) if isinstance(where, Path) else ():
        if (run / "config.toml").is_file():
            config, run_dir = load_config(run / "config.toml"), run
            if run == where:
                folder = CheckpointManager(config.checkpoint, run_dir=run).folder
            break
    manager = CheckpointManager(
        config.checkpoint if config else CheckpointSection(), run_dir=Path()
    )
    manager.folder = folder
    if any(storage_of(folder).exists(join(folder, mark)) for mark in (METADATA, MANIFEST)):
        manager.require_whole(step := folder)
    elif newest := manager.newest(read_only=True):
        step = newest
    else:
        raise CheckpointError(
            f"{folder} holds no checkpoint; name a run folder (with a config.toml) or a step of it"
        )
    return with_tokenizer(config or _config_within(step), run=run_dir, path=tokenizer), step


def open_run_tokenizer(config: JobConfig) -> Tokenizer:
    """Return the tokenizer of a config from `find_checkpoint`. Raises DataError if it cannot be read."""
    try:
        return open_tokenizer(config)
    except DataError as error:
        raise DataError(f"{error}. Here, --tokenizer PATH names it") from error


def _config_within(step: Location) -> JobConfig:
    """Return the config that a step was saved with, for a step that is not in its run folder."""
    text = read_metadata(step).get("config")
    if text is None:
        raise CheckpointError(f"{step}: holds no config, and there is no config.toml above it")
    return load_text(text, name=str(join(step, TITAN_JSON)))


def load_text(text: str, *, name: str, overrides: Iterable[str] = ()) -> JobConfig:
    """Return the config of a text, which errors call `name`, and of overrides. Raises ConfigError."""
    # load_config reads files, and names them in its errors.
    with NamedTemporaryFile(suffix=".toml") as file:
        file.write(text.encode())
        file.flush()
        try:
            return load_config(file.name, overrides=overrides)
        except ConfigError as error:
            raise ConfigError(
                replace(problem, file=name) if problem.file == file.name else problem
                for problem in error.problems
            ) from None


def load_model(
    where: Location, *, device: torch.device, tokenizer: str = ""
) -> tuple[nn.Module, Tokenizer, Location]:
    """Return the model of a checkpoint, unsharded on `device`, with its tokenizer and the step that was loaded.

    Args:
        where, tokenizer: as for `find_checkpoint`.
    """
    config, step = find_checkpoint(where, tokenizer=tokenizer)
    opened = open_run_tokenizer(config)  # before the weights, which take longer
    with torch.device("meta"):
        model = family(config.model.name).build_model(model_config(config.model))
    materialize(model, device=device)
    load(step, model_state([model]))
    return model.eval(), opened, step


def cache_attention(model: nn.Module) -> Callable[[], None]:
    """Let each inner attention of `model` remember keys and values. Return a function that undoes this."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    # Lists, since the loop changes what it walks over.
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, InnerAttention):
                setattr(parent, name, CachedAttention(child))
                swapped.append((parent, name, child))

    def undo() -> None:
        for parent, name, child in swapped:
            setattr(parent, name, child)

    return undo


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield token ids that follow `prompt`.

    Args:
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens; 0: among all.
        stop: token that ends the text, in addition to max_new_tokens.
    """
    device = next(model.parameters()).device
    # The same seed gives the same text on a device, whatever ran before.
    generator = torch.Generator(device=device).manual_seed(seed)
    # The model is left as it was, even if the caller stops half-way.
    undo = cache_attention(model)
    try:
        tokens_1S, position = torch.tensor([list(prompt)], device=device), 0
        for _ in range(max_new_tokens):
            positions = torch.arange(position, position + tokens_1S.shape[1], device=device)
            logits_V = model(tokens_1S, positions)[0, -1].float()
            token = _choose(logits_V, temperature=temperature, top_k=top_k, generator=generator)
            if token == stop:
                return
            yield token
            # The cache has the positions before, so only the new token goes through the model.
            position += tokens_1S.shape[1]
            tokens_1S = torch.tensor([[token]], device=device)
    finally:
        undo()


def _choose(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        # Tokens below the k-th likeliest get probability 0.
        kth = logits_V.topk(min(top_k, logits_V.numel())).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, float("-inf"))
    p_V = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(p_V, 1, generator=generator))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = argparse.ArgumentParser(prog="titan generate", description=main.__doc__)
    add = parser.add_argument
    where = "a run folder (its newest step) or a step-N folder, or its URL"
    add("--checkpoint", type=as_location, required=True, help=where)
    add("--prompt", default="", help="text to continue; empty: a new document")
    add("--max-new-tokens", type=int, default=200, metavar="N")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-k", type=int, default=50, help="0: no limit")
    add("--seed", type=int, default=0)
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--device", default="", help="cpu, cuda, ...; default: an accelerator if there is one")
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> torch.device:
    """Return the device of --device, or the best there is. Raises ConfigError for all options that make no sense."""
    problems = [
        Problem(COMMAND_LINE, 0, f"--{name}", f"expected a number of at least 0, got {value}")
        for name in ("max-new-tokens", "temperature", "top-k")
        if not 0 <= (value := getattr(args, name.replace("-", "_"))) < math.inf
    ]
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device = args.device or accelerator or "cpu"
    try:
        torch.empty(0, device=device).cpu()
    except Exception as error:  # torch has many types for a device that does not exist
        why = reason(error).split(". ")[0]
        problems.append(Problem(COMMAND_LINE, 0, "--device", f"cannot use {device}: {why}"))
    if problems:
        raise ConfigError(problems)
    return torch.device(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample text from a checkpoint: print the prompt and its continuation."""
    args = parse(argv)
    device, options = _check(args), {"tokenizer": args.tokenizer}
    model, tokenizer, step = load_model(args.checkpoint, device=device, **options)
    prompt = tokenizer.encode(args.prompt)
    if tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id, *prompt]
    if not prompt:
        raise DataError(
            "--prompt: this tokenizer has no begin-of-text token, so a prompt is needed"
        )
    print(f"[{step}, temperature {args.temperature:g}, top-k {args.top_k}]", file=sys.stderr)
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k")}
    new = sample(model, prompt, **options, seed=args.seed, stop=tokenizer.eos_id)
    print(args.prompt + tokenizer.decode(list(new)))
    return 0
