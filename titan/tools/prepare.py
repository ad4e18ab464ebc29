"""Command `titan prepare`: text as memory-mapped token shards, written before training.

    titan prepare --input corpus/*.jsonl.gz --tokenizer assets/llama3 --output shards --workers 32
    titan prepare --dataset fineweb-edu --tokenizer assets/llama3 --output shards --validation-fraction 0.001

It may be interrupted in any way, and the same command continues. The result depends neither on
interruptions nor on the number of workers. titan/data/writer.py does the work.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from titan.base.hardware import require_memory, usable_cores
from titan.config.options import add_quiet, whole
from titan.config.schema import Section, source_of
from titan.data import DataError
from titan.data.cache import display, exclusive
from titan.data.conversations import conversations
from titan.data.reading import Document
from titan.data.shards import Index
from titan.data.sources import Documents, open_documents, resolve_sources, source_of_path
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import tokenizer_named
from titan.data.unread import unread_line
from titan.data.writer import TokenizationSpec, write_shards

from .tables import parser_of


def _fraction(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def _open(arguments: Namespace) -> Documents:
    key, messages_key = arguments.text_key, arguments.messages_key
    if arguments.input:
        keys = {"text_key": key, "messages_key": messages_key}
        return open_all([source_of_path(path, **keys) for path in arguments.input])
    [section] = resolve_sources(arguments.dataset, dataset_path=arguments.dataset_path)
    # The option's key, even its default, replaces a preset's key.
    if source_of(section).text_key is not None:
        section = section.model_copy(update={"text_key": key})
    return open_all([section])


def open_all(sections: Sequence[Section]) -> Documents:
    """Return the documents of several sources, one source after another."""
    parts = [open_documents(section) for section in sections]
    sizes = [part.num_bytes for part in parts if part.num_bytes is not None]
    here = 0

    def read() -> Iterator[Document]:
        nonlocal here
        for here, part in enumerate(parts):  # noqa: B007 (`position` reads it)
            yield from part.read()

    return Documents(
        name=", ".join(part.name for part in parts),
        identity=[part.identity for part in parts],
        read=read,
        num_bytes=sum(sizes) if len(sizes) == len(parts) else None,
        position=lambda: sum(p.num_bytes or 0 for p in parts[:here]) + parts[here].position(),
    )


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
    lines.append(
        f'to train on it:\n  [training]\n  dataset = "shards"\n  dataset_path = "{folder}"'
    )
    # The held-out split is in the same folder, so the job only has to enable validation.
    if index.splits["validation"]:
        lines.append("  [validation]\n  enable = true")
    return "\n".join(lines)


def _prepare(arguments: Namespace) -> str:
    """Write the shards. Return a summary."""
    tokenizer = tokenizer_named(arguments.tokenizer, chat_template=arguments.chat_template)
    documents, folder, template = _open(arguments), arguments.output, None
    if arguments.messages_key:
        template = conversations().template_of(tokenizer)
    spec = TokenizationSpec(
        tokenizer=tokenizer,
        special_tokens=SpecialTokens.of(
            tokenizer, add_bos=not arguments.no_bos, add_eos=not arguments.no_eos
        ),
        validation_fraction=arguments.validation_fraction,
        template=template,
    )
    workers = arguments.workers or usable_cores()
    if arguments.workers:
        require_memory("--workers", workers)
    # One process at a time writes into a folder. A second process waits, and then finds the shards complete.
    with exclusive(folder), display(documents, title=f"preparing {folder}") as report:
        index = write_shards(
            documents,
            folder=folder,
            workers=workers,
            report=report,
            spec=spec,
            shard_tokens=arguments.shard_tokens,
        )
    if not index.splits["train"]:
        raise DataError(f"{documents.name} holds no documents to train on")
    return _summary(folder, index, [f"  {line}" for line in tokenizer.unread])


def main(argv: list[str]) -> int:
    """Run `titan prepare` with its arguments. Return the exit code."""
    tokens = partial(whole, least=1, digits=12)
    parser = parser_of("prepare", tokens=tokens, fraction=_fraction)
    add_quiet(parser)
    arguments = parser.parse_args(argv)
    try:
        print(_prepare(arguments))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 75  # as for a run that a signal has stopped: finished work is kept
    return 0
