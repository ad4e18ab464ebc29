"""Sample text from a checkpoint or a Hugging Face folder (`titan generate`): of a prompt, of a file of prompts, or in a conversation.

sampling.py chooses the tokens. Under torchrun, tensor parallelism splits the model over all ranks. Every rank computes the
same tokens, and rank 0 reads and prints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan.checkpoint.commit import TITAN_JSON, CheckpointGroup
from titan.checkpoint.hf_model import HFModel
from titan.checkpoint.huggingface import CONFIG as HF_CONFIG
from titan.checkpoint.huggingface import load as load_folder
from titan.checkpoint.huggingface import open_folder, read_sizes, require_weights_for
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
from titan.config.options import positive
from titan.config.schema import CheckpointSection, JobConfig
from titan.data import DataError
from titan.data.chat import ChatTemplate
from titan.data.reading import messages_of, read_row
from titan.data.tokenizer import Tokenizer, tokenizer_named
from titan.data.tokenizer_files import with_tokenizer
from titan.parallel import apply_tp, build_mesh, materialize
from titan.parallel.init_distributed import start_process_group
from titan.parallelize import default_dtype, torch_dtype
from titan.tools.sampling import sample, streamed
from titan.untrusted import read_text

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
    where: Location, *, device: torch.device, tokenizer: str = "", dtype: str = "float32"
) -> tuple[nn.Module, Tokenizer, Location]:
    """Return the model of a checkpoint on `device`, with its tokenizer and the step that was loaded.

    With a process group, all ranks call this, and tensor parallelism splits the model over them.

    Args:
        where, tokenizer: as for `find_checkpoint`; or a Hugging Face folder.
        dtype: of the weights.
    """
    # A step may have both forms of the weights.
    is_folder = (
        isinstance(where, Path)
        and (where / HF_CONFIG).is_file()
        and not (where / METADATA).is_file()
    )
    if isinstance(where, Path) and is_folder:
        (name, sizes), step = read_sizes(folder := open_folder(where)), where
        require_weights_for(sizes, folder)
        opened = tokenizer_named(tokenizer or str(where))
    else:
        config, step = find_checkpoint(where, tokenizer=tokenizer)
        opened = open_run_tokenizer(config)  # before the weights, which take longer
        name, sizes = config.model.name, model_config(config.model)
    with torch.device("meta"), default_dtype(torch_dtype(dtype)):
        model = family(name).build_model(sizes)
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        apply_tp(
            model,
            mesh=build_mesh(device.type, tp=ranks)["tp"],
            plan=family(name).TENSOR_PLAN,
            num_kv_heads=sizes.n_kv_heads,
            loss_parallel=False,
        )
    materialize(model, device=device)
    state = model_state([model])
    if isinstance(step, Path) and is_folder:
        load_folder(step, state, model=HFModel.of(name, sizes), group=CheckpointGroup())
    else:
        load(step, state)
    return model.eval(), opened, step


@dataclass(frozen=True)
class _Prompt:
    """Hold what a text or a conversation becomes. given: what the answer's line repeats."""

    ids: list[int]
    given: dict[str, Any]


class Generator:
    """Answer prompts with a model, by the command's options."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, args.batch_size
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        self.options = {name: getattr(args, name) for name in names}
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """Return the tokenizer's chat template. Raises DataError if it has none."""
        self._template = self._template or ChatTemplate.of(self.tokenizer)
        return self._template

    def of_text(self, text: str) -> _Prompt:
        """Return a text that is to go on. Raises DataError for an empty one that the tokenizer cannot begin."""
        ids = self.tokenizer.encode(text)
        if self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id, *ids]
        if not ids:
            raise DataError(
                "--prompt: this tokenizer has no begin-of-text token, so a prompt is needed"
            )
        return _Prompt(ids, {"prompt": text})

    def of_messages(self, messages: list[dict[str, Any]], *, where: str) -> _Prompt:
        """Return a conversation that is to be answered."""
        return _Prompt(self.template.prompt(messages, where=where), {"messages": messages})

    def tokens(self, prompts: Sequence[_Prompt]) -> Iterator[list[int | None]]:
        """Yield what `sample` yields for these prompts."""
        # Who speaks next in a conversation is no part of its answer.
        ends = self._template.end_ids if self._template else set()
        stop = {self.tokenizer.eos_id, *ends}
        return sample(self.model, [prompt.ids for prompt in prompts], **self.options, stop=stop)

    def stream(self, prompt: _Prompt) -> Iterator[str]:
        """Yield the text that follows a prompt, as it comes."""
        tokens = (token for [token] in self.tokens([prompt]) if token is not None)
        return streamed(self.tokenizer, tokens)

    def answer_file(self, prompts: Sequence[_Prompt]) -> None:
        """Print a line of JSON for each prompt, in their order."""
        # Prompts of about the same length share a batch, which then has little padding.
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
        answers = [""] * len(prompts)
        for begin in range(0, len(order), self.batch_size):
            numbers = order[begin : begin + self.batch_size]
            steps = list(self.tokens([prompts[number] for number in numbers]))
            for row, number in enumerate(numbers):
                ids = [token for step in steps if (token := step[row]) is not None]
                answers[number] = self.tokenizer.decode(ids)
        for prompt, answer in zip(prompts, answers, strict=True):
            if self.is_first:
                print(json.dumps({**prompt.given, "completion": answer}, ensure_ascii=False))

    def converse(self) -> None:
        """Answer each line of standard input, in one conversation, until its end or an empty line."""
        messages: list[dict[str, Any]] = []
        while (line := self._read()) is not None:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                prompt = self.of_messages(asked, where="standard input")
            except DataError as error:  # a special token's name, for instance
                print(error, file=sys.stderr)
                continue
            answer = self.print_stream(self.stream(prompt))
            messages = [*asked, {"role": "assistant", "content": answer.strip()}]

    def print_stream(self, parts: Iterable[str]) -> str:
        """Print parts of a text as they come, on one rank. Return the text."""
        text = ""
        for part in parts:
            text += part
            print(part if self.is_first else "", end="", flush=True)
        if self.is_first:
            print()
        return text

    def _read(self) -> str | None:
        """Return the next line, on every rank, or None at the end."""
        line = None
        if self.is_first:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline().rstrip("\n") or None
        if dist.is_initialized():
            lines = [line]
            dist.broadcast_object_list(lines)
            [line] = lines
        return line


def _read_prompts(file: Path, generator: Generator) -> list[_Prompt]:
    """Return the prompts of a file: its lines or, of JSON Lines, their `prompt` or `messages`. Raises DataError."""
    prompts = []
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        if file.suffix != ".jsonl" or not line:
            prompts += [generator.of_text(line)] if line else []
            continue
        row, where = read_row(line.encode(), where=f"{file}:{number}"), f"{file}:{number}"
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            prompts.append(generator.of_text(row["prompt"]))
        else:
            messages = messages_of(row, "messages", where=where)
            prompts.append(generator.of_messages(messages, where=where))
    if not prompts:
        raise DataError(f"{file}: holds no prompts; write one in each line")
    return prompts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = argparse.ArgumentParser(prog="titan generate", description=main.__doc__)
    add = parser.add_argument
    where = "a run folder (its newest step), a step-N folder or its URL, or a Hugging Face folder"
    add("--checkpoint", type=as_location, required=True, help=where)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", default="", help="text to continue; empty: a new document")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt in each line; of .jsonl: `prompt` or `messages`. Prints JSON Lines",
    )
    group.add_argument(
        "--interactive", action="store_true", help="answer what you type, line by line"
    )
    add("--chat", action="store_true", help="--prompt is a question, for the tokenizer's template")
    add("--batch-size", type=positive, default=8, metavar="B", help="of --prompts; default: 8")
    add("--max-new-tokens", type=int, default=200, metavar="N")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-k", type=int, default=50, help="0: no limit")
    help_ = "sample among the likeliest tokens that have this probability together; default: 1"
    add("--top-p", type=float, default=1.0, help=help_)
    add("--seed", type=int, default=0)
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--device", default="", help="cpu, cuda, ...; default: an accelerator if there is one")
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, default=dtypes[0], help="of the weights; default: float32")
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> torch.device:
    """Return the device of --device, or the best there is. Raises ConfigError for all options that make no sense."""
    problems = [
        Problem(COMMAND_LINE, 0, f"--{name}", f"expected a number of at least 0, got {value}")
        for name in ("max-new-tokens", "temperature", "top-k", "top-p")
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
    device = _check(args)
    if "RANK" in os.environ:  # of torchrun
        found = start_process_group(init_timeout_s=600, expandable_segments=False)
        device = device if args.device else found
    try:
        _answer(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _answer(args: argparse.Namespace, device: torch.device) -> None:
    options = {"tokenizer": args.tokenizer, "dtype": args.dtype}
    model, tokenizer, step = load_model(args.checkpoint, device=device, **options)
    generator = Generator(model, tokenizer, args)
    prompts = _read_prompts(args.prompts, generator) if args.prompts else []
    if args.chat:
        messages = [{"role": "user", "content": args.prompt}]
        prompts = [generator.of_messages(messages, where="--prompt")]
    elif args.interactive:
        _ = generator.template  # its absence is said before the first question
    elif not prompts:
        prompts = [generator.of_text(args.prompt)]
    if generator.is_first:
        settings = f"temperature {args.temperature:g}, top-k {args.top_k}, top-p {args.top_p:g}"
        print(f"[{step}, {settings}]", file=sys.stderr)
    if args.interactive:
        generator.converse()
    elif args.prompts:
        generator.answer_file(prompts)
    else:
        before = "" if args.chat else args.prompt
        generator.print_stream(chain([before], generator.stream(prompts[0])))
