"""Command `titan prepare`: text as memory-mapped token shards, written before training.

    titan prepare --input corpus/*.jsonl.gz --tokenizer assets/llama3 --output shards --workers 32
    titan prepare --dataset fineweb-edu --tokenizer assets/llama3 --output shards --validation-fraction 0.001
    titan prepare --input 'corpus/*.parquet' --tokenizer assets/llama3 --output shards --engine ray

It may be interrupted in any way, and the same command continues. The result depends neither on
interruptions nor on the number of workers and hosts. titan/data/writer.py does the work on one host,
and prepare_hosts.py on many.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan.config.options import add_quiet, positive
from titan.data import DataError
from titan.data.cache import display, exclusive, usable_cores
from titan.data.chat import ChatTemplate
from titan.data.parts import Parts
from titan.data.shards import Index
from titan.data.sources import Documents, open_all, resolve_sources, source_of_path
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import tokenizer_named
from titan.data.unread import unread_line
from titan.data.writer import TokenizationSpec, write_shards
from titan.tools.prepare_hosts import on_ray, run_here, write_array
from titan.untrusted import InputError

INPUT_HELP = 'text, JSONL or Parquet (files, folders, globs), or "stdlib"'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="titan prepare", description="Text to token shards.")
    add = parser.add_argument
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--input", nargs="+", metavar="PATH", help=INPUT_HELP)
    text.add_argument("--dataset", help="a preset (stdlib, c4, fineweb-edu) or a name at the hub")
    add("--dataset-path", metavar="PATH", help="a local copy of --dataset")
    add("--text-key", default="text", help="field or column with the text; default: text")
    add("--messages-key", default="", metavar="KEY", help="field with a conversation, in its place")
    help_ = "a Jinja file for conversations; default: the tokenizer's own"
    add("--chat-template", default="", metavar="FILE", help=help_)
    add("--tokenizer", required=True, metavar="PATH", help='file, folder, or "bytes"')
    add("--output", required=True, metavar="DIR", type=Path, help="folder to write, or continue")
    add("--workers", type=positive, help="processes; default: cores, here or of the Ray cluster")
    help_ = "use many hosts: run on a Ray cluster, or write the script of a Slurm array"
    add("--engine", choices=("ray", "slurm"), help=help_)
    add("--address", metavar="HOST:PORT", help="address of the Ray cluster; default: auto")
    help_ = "do the I-th of N shares, as a task of the array does"
    add("--share", nargs=2, type=positive, metavar=("I", "N"), help=help_)
    add("--shard-tokens", type=positive, default=2**27, help="tokens a shard; default: 2^27")
    add("--validation-fraction", type=_fraction, default=0.0, help="share of documents held out")
    add("--no-bos", action="store_true", help="no begin token before a document")
    add("--no-eos", action="store_true", help="no end token after a document")
    add_quiet(parser)
    return parser


def _fraction(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def _open(arguments: argparse.Namespace) -> Documents:
    key, messages_key = arguments.text_key, arguments.messages_key
    if arguments.input:
        keys = {"text_key": key, "messages_key": messages_key}
        return open_all([source_of_path(path, **keys) for path in arguments.input])
    [section] = resolve_sources(arguments.dataset, dataset_path=arguments.dataset_path)
    # The option's key, even its default, replaces a preset's key.
    if hasattr(section, "text_key"):
        section = section.model_copy(update={"text_key": key})
    return open_all([section])


def _summary(folder: Path, index: Index, unread: list[str]) -> str:
    lines = [f"{folder}: {index.tokenizer} tokenizer, {index.vocab_size} ids, {index.dtype}"]
    for split, shards in index.splits.items():
        if shards:
            tokens, num_bytes = index.total(split), index.total(split, "bytes")
            lines.append(
                f"  {split}: {tokens:,} tokens, {index.total(split, 'documents'):,} documents, "
                f"{len(shards)} shards, {num_bytes / tokens:.2f} bytes/token"
            )
    lines += [f"  {line}" for line in (unread_line(index.unread),) if line] + unread
    lines += [
        "to train on it:",
        "  [training]",
        '  dataset = "shards"',
        f'  dataset_path = "{folder}"',
    ]
    # The held-out split is in the same folder, so the job only has to enable validation.
    if index.splits["validation"]:
        lines += ["  [validation]", "  enable = true"]
    return "\n".join(lines)


def _prepare(arguments: argparse.Namespace, words: list[str]) -> str:
    """Write the shards, or the script that does. Return a summary."""
    engine, share = arguments.engine, arguments.share
    if arguments.address and engine != "ray":
        raise DataError("--address is that of a Ray cluster: it needs --engine ray")
    if share and share[0] > share[1]:
        raise DataError(f"--share {share[0]} {share[1]}: shares are numbered from 1 to {share[1]}")
    if share and engine != "slurm":
        raise DataError("--share is for a task of a Slurm array: it needs --engine slurm")
    tokenizer = tokenizer_named(arguments.tokenizer, chat_template=arguments.chat_template)
    documents, folder = _open(arguments), arguments.output
    spec = TokenizationSpec(
        tokenizer=tokenizer,
        special_tokens=SpecialTokens.of(
            tokenizer, add_bos=not arguments.no_bos, add_eos=not arguments.no_eos
        ),
        validation_fraction=arguments.validation_fraction,
        template=ChatTemplate.of(tokenizer) if arguments.messages_key else None,
    )
    how: dict[str, Any] = {"spec": spec, "shard_tokens": arguments.shard_tokens}
    if engine:
        # Other hosts have other working folders.
        index = _on_hosts(Parts(documents, folder=folder.absolute(), **how), arguments, words)
        if isinstance(index, str):
            return index
    else:
        # One process at a time writes into a folder. A second process waits, and then finds the shards complete.
        with exclusive(folder), display(documents, title=f"preparing {folder}") as report:
            workers = arguments.workers or usable_cores()
            index = write_shards(documents, folder=folder, workers=workers, report=report, **how)
        shutil.rmtree(folder / "parts", ignore_errors=True)  # of --engine, which began the folder
    if not index.splits["train"]:
        raise DataError(f"{documents.name} holds no documents to train on")
    return _summary(folder, index, [f"  {line}" for line in tokenizer.unread])


def _on_hosts(parts: Parts, arguments: argparse.Namespace, words: list[str]) -> Index | str:
    """Do the work, or a share of it, on several hosts. Return the index, or what is left to do."""
    share, shares = arguments.share or (1, 1)
    # A task must not divide the work: it may be on a host that does not see the folder.
    parts.check() if arguments.share else parts.divide()
    units, engine = len(parts.plan.sizes), arguments.engine
    if engine == "slurm" and not arguments.share and not parts.is_complete:
        script, left = write_array(parts, words, tasks=arguments.workers), len(parts.missing())
        return f"{units - left} of {units} units are done; to do the others: sbatch {script}"
    documents = replace(parts.documents, num_bytes=sum(parts.plan.sizes[share - 1 :: shares]))
    with ExitStack() as stack:
        report = stack.enter_context(display(documents, title=f"preparing {parts.folder}"))
        run = run_here(parts)
        if engine == "ray" and not parts.is_complete:
            address = arguments.address or os.environ.get("RAY_ADDRESS") or "auto"
            run = stack.enter_context(on_ray(parts, address, at_a_time=arguments.workers))
        index = parts.write(run, report, share=share - 1, shares=shares)
    return (
        index
        or f"share {share} of {shares} is done; {len(parts.missing())} of {units} units are left to other tasks"
    )


def main(argv: list[str]) -> int:
    """Run `titan prepare` with its arguments. Return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        print(_prepare(arguments, argv))
    except InputError as error:
        print(f"titan prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("titan prepare: interrupted; the same command continues", file=sys.stderr)
        return 75  # as for a run that a signal has stopped: finished work is kept
    return 0
