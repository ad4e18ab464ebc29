"""`titan prepare`: text to memory-mapped token shards, ahead of training.

    titan prepare --input corpus/*.jsonl.gz --tokenizer assets/llama3 --output shards --workers 32
    titan prepare --dataset fineweb-edu --tokenizer assets/llama3 --output shards --validation-fraction 0.001

It may be interrupted in any way; the same command continues. The result depends on neither that nor the
number of workers. writer.py does the work.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.config.sections import TokenizerSection
from titan.data.cache import exclusive
from titan.data.errors import DataError
from titan.data.packing import Framing
from titan.data.shards import SPLITS, Index
from titan.data.sources import (
    Documents,
    join_documents,
    open_documents,
    resolve_sources,
    source_of_path,
)
from titan.data.tokenizer import build_tokenizer
from titan.data.writer import Progress, Recipe, write_shards

_PLAIN_INTERVAL_S = 10.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan prepare", description="Turn text into token shards."
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--input", nargs="+", metavar="PATH", help="text, JSONL or Parquet: files, folders, globs"
    )
    text.add_argument(
        "--dataset",
        metavar="NAME",
        help="a preset (stdlib, c4, fineweb-edu) or a Hugging Face dataset",
    )
    parser.add_argument("--dataset-path", metavar="PATH", help="a local copy of --dataset")
    parser.add_argument(
        "--text-key", default="text", help="field or column with the text (default: text)"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="PATH", help='file, folder, or "bytes"'
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write, or to continue"
    )
    parser.add_argument(
        "--workers", type=_at_least(1), default=usable_cores(), help="processes (default: cores)"
    )
    parser.add_argument(
        "--shard-tokens", type=_at_least(1), default=2**27, help="tokens a shard (default: 2^27)"
    )
    parser.add_argument(
        "--validation-fraction", type=_fraction, default=0.0, help="share of documents held out"
    )
    parser.add_argument("--no-bos", action="store_true", help="no begin token before a document")
    parser.add_argument("--no-eos", action="store_true", help="no end token after a document")
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return integer


def _fraction(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def usable_cores() -> int:
    """Cores this process may run on, which in a container or a Slurm job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenizer_section(value: str) -> TokenizerSection:
    """The section that a tokenizer named on a command line stands for."""
    return TokenizerSection(name="bytes") if value == "bytes" else TokenizerSection(path=value)


@contextmanager
def _display(documents: Documents, shards_of: Path) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal, a line every 10 seconds elsewhere."""
    begin = time.monotonic()

    def describe(progress: Progress) -> str:
        rate = progress.text_bytes / max(time.monotonic() - begin, 1e-9) / 1e6
        return (
            f"{progress.documents:,} documents  {progress.tokens:,} tokens  "
            f"{progress.shards} shards written  {rate:.1f} MB/s"
        )

    if not sys.stderr.isatty():
        last = begin

        def plain(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= _PLAIN_INTERVAL_S:
                last = time.monotonic()
                print(describe(progress), file=sys.stderr, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"preparing {shards_of}", total=documents.num_bytes)
        yield lambda p: bar.update(task, description=describe(p), completed=p.text_bytes)
        bar.update(task, completed=documents.num_bytes)


def _open(arguments: argparse.Namespace) -> Documents:
    if arguments.dataset:
        sections = resolve_sources(arguments.dataset, dataset_path=arguments.dataset_path)
        if hasattr(sections[0], "text_key"):
            sections = [
                section.model_copy(update={"text_key": arguments.text_key}) for section in sections
            ]
    else:
        sections = [source_of_path(path, text_key=arguments.text_key) for path in arguments.input]
    return join_documents([open_documents(section) for section in sections])


def _summary(folder: Path, index: Index) -> str:
    lines = [f"{folder}: {index.tokenizer} tokenizer, {index.vocab_size} ids, {index.dtype.name}"]
    for split in SPLITS:
        if shards := index.splits.get(split):
            tokens, num_bytes = index.total(split), index.total(split, "bytes")
            lines.append(
                f"  {split}: {tokens:,} tokens, {index.total(split, 'documents'):,} documents, "
                f"{len(shards)} shards, {num_bytes / tokens:.2f} bytes/token"
            )
    return "\n".join(
        [*lines, f'  train on it: training.dataset = "shards", training.dataset_path = "{folder}"']
    )


def _prepare(arguments: argparse.Namespace) -> None:
    section = tokenizer_section(arguments.tokenizer)
    tokenizer = build_tokenizer(section, hf_assets_path="")
    framing = Framing.of(tokenizer, add_bos=not arguments.no_bos, add_eos=not arguments.no_eos)
    documents = _open(arguments)
    folder = Path(arguments.output)
    with exclusive(folder), _display(documents, folder) as report:
        index = write_shards(
            documents,
            folder=folder,
            recipe=Recipe(
                tokenizer=tokenizer,
                framing=framing,
                validation_fraction=arguments.validation_fraction,
            ),
            shard_tokens=arguments.shard_tokens,
            workers=arguments.workers if arguments.workers > 1 else 0,
            tokenizer_section=section,
            report=report,
        )
    if not index.total("train"):
        raise DataError(f"{documents.name} holds no documents to train on")
    print(_summary(folder, index))


def main(argv: list[str]) -> int:
    """Run `titan prepare` with its arguments; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        _prepare(arguments)
    except DataError as error:
        print(f"titan prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("titan prepare: interrupted; the same command continues", file=sys.stderr)
        return 75  # stopped by a signal, what was done is kept
    return 0
