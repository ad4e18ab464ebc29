"""Answers of a model to prompts, for `titan generate` (titan/tools/generate.py)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan.base.untrusted import read_lines
from titan.checkpoint.saved_model import (
    find_checkpoint,
    hf_job,
    is_hf_folder,
    load_weights,
    open_run_tokenizer,
    require_average,
)
from titan.checkpoint.storage import Location
from titan.config.model import family, tensor_plan_of
from titan.config.schema import JobConfig
from titan.config.task import predicts_tokens
from titan.data import DataError
from titan.data.conversations import conversations
from titan.data.files import is_jsonl
from titan.data.reading import read_row
from titan.data.special_tokens import begin_ids, start_ids
from titan.data.tokenizer import Tokenizer
from titan.parallel import apply_tp, build_mesh, materialize
from titan.step.parallelize import default_dtype, torch_dtype
from titan.tasks import task_of

from .generation import Generator, streamed


def find_model(
    where: Location, tokenizer: str = "", *, trust_remote_code: bool = False
) -> tuple[JobConfig, Location]:
    """Return the job of a checkpoint or a Hugging Face folder, and the step or folder.

    Args:
        where: as for `find_checkpoint`; or a Hugging Face folder.
        tokenizer: as for `find_checkpoint`.
        trust_remote_code: as for `find_checkpoint`.
    """
    if is_hf_folder(where):
        return hf_job(where, tokenizer=tokenizer), where
    return find_checkpoint(where, tokenizer=tokenizer, trust_remote_code=trust_remote_code)


def open_tokenizer(config: JobConfig) -> Tokenizer:
    """Return the tokenizer of a model, with the tokens that begin its texts.

    Raises:
        DataError: the model writes no text.
    """
    if not predicts_tokens(config):
        raise DataError(
            f"{config.model.name} writes no text: --output FILE writes what it draws"
        )
    opened = open_run_tokenizer(config)
    opened.begin_ids = begin_ids(opened, add_bos=config.data.add_bos)
    return opened


def load_model(
    config: JobConfig,
    step: Location,
    *,
    device: torch.device,
    dtype: str = "float32",
    average: bool = False,
) -> nn.Module:
    """Load a model. With a process group, all ranks call it, and tensor parallelism splits the model over them.

    Args:
        config: job of the model.
        step: a checkpoint, or a Hugging Face folder.
        device: device of the model.
        dtype: dtype of the weights.
        average: load the average of the weights.
    """
    name, sizes = config.model.name, config.model.sizes
    if average:
        require_average(step)
    with torch.device("meta"), default_dtype(torch_dtype(dtype)):
        model = family(name).build_model(sizes)
    weights: dict[str, Any] = {"name": name, "sizes": sizes, "average": average}
    load_weights(step, [model], only_check=True, **weights)
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        try:
            apply_tp(
                model,
                mesh=build_mesh(device.type, tp=ranks)["tp"],
                plan=tensor_plan_of(model, family(name)),
                num_kv_heads=sizes.n_kv_heads,
                loss_parallel=False,
            )
        except ValueError as error:
            raise DataError(f"--nproc {ranks}: {error}") from None
    materialize(model, device=device)
    load_weights(step, [model], **weights)
    return model.eval()


@dataclass(frozen=True)
class _Prompt:
    """Prompt: a text, a picture or a conversation.

    Attributes:
        ids: token ids.
        given: fields that the answer's line repeats.
        inputs_of: see `Generator.stream`.
    """

    ids: list[int]
    given: dict[str, Any]
    inputs_of: Callable[[Tensor], Mapping[str, Tensor]] | None = None


class Answers:
    """Answers to prompts, by the command's options.

    Attributes:
        tokenizer: the model's tokenizer.
        batch_size: prompts of a batch.
        generator: generator with the command's options.
        is_first: whether this rank reads and prints.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, args: argparse.Namespace
    ) -> None:
        self.tokenizer, self.batch_size = tokenizer, args.batch_size
        names = ("max_new_tokens", "temperature", "top_k", "seed")
        self.generator = Generator(model=model, **{name: getattr(args, name) for name in names})
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0

    @cached_property
    def template(self) -> Any:
        """Return the tokenizer's chat template. It raises DataError if the tokenizer has none."""
        return conversations().template_of(self.tokenizer)

    def of_text(self, text: str) -> _Prompt:
        """Encode a text to continue.

        Raises:
            DataError: the text is empty, and the tokenizer has no begin token.
        """
        ids = [*(self.tokenizer.begin_ids or ()), *self.tokenizer.encode(text)]
        if not (ids := ids or start_ids(self.tokenizer)):
            raise DataError(
                "--prompt: this tokenizer has no begin-of-text token, so a prompt is needed"
            )
        return _Prompt(ids, {"prompt": text})

    def of_messages(self, chat: Any, *, where: str) -> _Prompt:
        """Encode a conversation to answer."""
        given = {"messages": chat} if isinstance(chat, list) else chat
        return _Prompt(self.template.prompt(chat, where=where), given)

    @property
    def stopping(self) -> Generator:
        """Return the generator with the tokens that end an answer."""
        # The next speaker of a conversation is no part of the answer.
        ends = self.tokenizer.end_ids
        if "template" in vars(self):
            ends = conversations().answer_ends(self.tokenizer)
        return replace(self.generator, stop={*ends})

    def stream(self, prompt: _Prompt) -> Iterator[str]:
        """Yield the continuation of a prompt, piece by piece."""
        steps = self.stopping.stream([prompt.ids], inputs_of=prompt.inputs_of)
        tokens = (token for [token] in steps if token is not None)
        return streamed(self.tokenizer, tokens, prompt=prompt.ids)

    def answer_file(self, prompts: Sequence[_Prompt]) -> None:
        """Print a line of JSON for each prompt, in their order."""
        for begin in range(0, len(prompts), self.batch_size):
            batch = prompts[begin : begin + self.batch_size]
            for prompt, ids in zip(
                batch, self.stopping.complete([each.ids for each in batch]), strict=True
            ):
                text = self.tokenizer.continuation(prompt.ids, ids)
                if self.is_first:
                    print(json.dumps({**prompt.given, "completion": text}, ensure_ascii=False))

    def converse(self) -> None:
        """Answer each line of standard input, in one conversation, until its end or an empty line."""
        messages = []
        while line := self._read():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                prompt = self.of_messages(asked, where="standard input")
            except DataError as error:  # a special token's name, for instance
                print(error, file=sys.stderr)
                continue
            answer = self.print_stream(self.stream(prompt))
            messages = [*asked, {"role": "assistant", "content": answer.strip()}]

    def _read(self) -> str:
        print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().rstrip("\n")

    def print_stream(self, parts: Iterable[str]) -> str:
        """Print pieces of a text as they arrive, on one rank. Return the text."""
        text = ""
        for part in parts:
            text += part
            print(part if self.is_first else "", end="", flush=True)
        if self.is_first:
            print()
        return text


def read_prompts(file: Path, answers: Answers) -> list[_Prompt]:
    """Read the prompts of a file: its lines, or `prompt` or `messages` of JSON Lines.

    Raises:
        DataError: a line is wrong, or there is none.
    """
    prompts = []
    for number, line in read_lines(file):
        if not is_jsonl(file):
            prompts.append(answers.of_text(line))
            continue
        row, where = read_row(line.encode(), where=f"{file}:{number}"), f"{file}:{number}"
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            prompts.append(answers.of_text(row["prompt"]))
        elif not isinstance(row, dict) or "messages" not in row:
            raise DataError(
                f'{where}: has no text under "prompt", and no list of messages under "messages"'
            )
        else:
            chat = conversations().chat_of(row, "messages", where=where)
            prompts.append(answers.of_messages(chat, where=where))
    if not prompts:
        raise DataError(f"{file}: holds no prompts; write one in each line")
    return prompts


def _draw(config: JobConfig, step: Location, args: argparse.Namespace, **options: Any) -> None:
    """Write the picture of a model into --output.

    Raises:
        DataError: the model or the options do not allow it.
    """
    if predicts_tokens(config):
        raise DataError(f"--output: {config.model.name} writes text; leave it out")
    if is_hf_folder(step):
        raise DataError(
            f"{step}: names no task, and so no pictures; give the run that trained it"
        )
    if dist.is_initialized():
        raise DataError(f"--nproc: {config.model.name} draws in one process; leave it out")
    if args.output.is_dir() or not args.output.absolute().parent.is_dir():
        raise DataError(f"--output {args.output}: names no file in a folder that exists")
    model = load_model(config, step, **options)
    try:
        task_of(config).draw(model, args.prompt, seed=args.seed, file=args.output)
    except OSError as error:
        raise DataError(f"--output {args.output}: cannot be written: {error}") from error
    print(f"[{step}] wrote {args.output}", file=sys.stderr)


def answer(args: argparse.Namespace, device: torch.device) -> None:
    """Load the model, and print or draw what `titan generate` asks for."""
    trusts = args.trust_remote_code
    config, step = find_model(args.checkpoint, args.tokenizer, trust_remote_code=trusts)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    options = {"device": device, "dtype": dtype, "average": args.average}
    if args.output:
        return _draw(config, step, args, **options)
    tokenizer = open_tokenizer(config)
    prompts = []
    if args.image:
        ids, inputs_of = task_of(config).prompt_with(args.image, args.prompt)
        prompts = [_Prompt(ids, {}, inputs_of)]
    answers = Answers(load_model(config, step, **options), tokenizer, args)
    if args.prompts:
        prompts = read_prompts(args.prompts, answers)
    elif args.chat:
        messages = [{"role": "user", "content": args.prompt}]
        prompts = [answers.of_messages(messages, where="--prompt")]
    elif args.interactive:
        _ = answers.template  # report a missing template before the first question
    elif not prompts:
        prompts = [answers.of_text(args.prompt)]
    if answers.is_first:
        settings = f"temperature {args.temperature:g}, top-k {args.top_k}"
        print(f"[{step}, {settings}]", file=sys.stderr)
    if args.interactive:
        answers.converse()
    elif args.prompts:
        answers.answer_file(prompts)
    else:
        before = "" if args.chat or args.image else args.prompt
        answers.print_stream(chain([before], answers.stream(prompts[0])))
