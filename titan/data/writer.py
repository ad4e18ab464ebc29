"""Writing token shards: parallel, resumable, and the same bytes for any number of workers and interruptions.

One process reads documents in order and cuts them into chunks; workers tokenise chunks; results come back in order
and are appended to the open shard of their split. A shard that is full goes from its temporary to its final
name, then progress.json says so, with the number of documents read by then. A later run reads from the start but
tokenises only what no closed shard holds. Shards end at document ends and depend on nothing but the documents
and the options, so a run killed anywhere continues to the same bytes.

Called by prepare.py (a user's folder) and cache.py (the cache of raw text sources).
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from titan.data.errors import DataError
from titan.data.framing import Framing
from titan.data.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    SPLITS,
    Index,
    Shard,
    read_index,
    temporary_name,
    token_dtype,
    write_index,
)
from titan.data.sources import Documents, in_validation
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Of a chunk: large enough to hide the hand-over, small enough to keep few in memory.
_CHUNK_DOCUMENTS, _CHUNK_CHARS = 256, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How documents become tokens: what a worker needs, and what the result depends on besides the text."""

    tokenizer: Tokenizer
    framing: Framing
    validation_fraction: float

    def split_of(self, text: str) -> str:
        return SPLITS[in_validation(text, fraction=self.validation_fraction)]

    def key(self, documents: Documents, *, shard_tokens: int) -> str:
        parts = [FORMAT, documents.identity, self.tokenizer.fingerprint, asdict(self.framing)]
        text = json.dumps([*parts, self.validation_fraction, shard_tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Progress:
    """What was done so far; for the display."""

    documents: int = 0
    chars: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Chunk:
    """Consecutive documents, the first with its number: what a worker gets at a time."""

    first: int
    texts: list[str]


@dataclass(frozen=True)
class _Document:
    """A tokenised document, framed."""

    number: int
    split: str
    tokens: np.ndarray
    num_bytes: int


class _SplitWriter:
    """The shards of one split, listed in `closed`; the open one has a temporary name until it is full."""

    def __init__(self, folder: Path, *, split: str, limit: int, closed: list[Shard]) -> None:
        self._folder, self._split, self._limit, self._closed = folder, split, limit, closed
        self._file: BinaryIO | None = None
        self._shard = Shard(file="")

    def add(self, document: _Document) -> bool:
        """Append a document; True where that closed the shard before it, which had no room for it."""
        tokens = document.tokens
        full = self._file is not None and self._shard.tokens + len(tokens) > self._limit
        if full:
            self.close(documents_read=document.number)
        if self._file is None:
            self._shard = Shard(file=f"{self._split}-{len(self._closed):05d}.bin")
            self._file = temporary_name(self._folder / self._shard.file).open("wb")
        self._file.write(tokens.tobytes())
        self._shard.tokens += len(tokens)
        self._shard.documents += 1
        self._shard.bytes += document.num_bytes
        return full

    def close(self, *, documents_read: int) -> None:
        """Give the open shard, if there is one, its final name, after its bytes are on disk."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, path = None, self._folder / self._shard.file
        temporary_name(path).replace(path)
        self._shard.documents_read = documents_read
        self._closed.append(self._shard)


def write_shards(
    documents: Documents,
    *,
    folder: Path,
    recipe: Recipe,
    shard_tokens: int,
    workers: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Index:
    """Tokenise `documents` into `folder`, or continue; the caller keeps other processes away.

    workers: processes that tokenise; 1: this process does, with threads.
    """
    index = _open_index(folder, key=recipe.key(documents, shard_tokens=shard_tokens), recipe=recipe)
    if (folder / INDEX).is_file():
        return index
    logger.info("tokenising %s into %s", documents.name, folder)
    for left_over in folder.glob("*.tmp"):
        left_over.unlink()
    done = {s: shards[-1].documents_read if shards else 0 for s, shards in index.splits.items()}
    writers = {
        split: _SplitWriter(folder, split=split, limit=shard_tokens, closed=closed)
        for split, closed in index.splits.items()
    }
    progress = Progress()
    for chunk, encoded in _encoded_chunks(documents, recipe, done, workers=workers):
        for document in encoded:
            if writers[document.split].add(document):
                write_index(folder / PROGRESS, index)
            progress.tokens += len(document.tokens)
        progress.documents += len(chunk.texts)
        progress.chars += sum(map(len, chunk.texts))
        report(progress)
    for writer in writers.values():
        writer.close(documents_read=progress.documents)
    write_index(folder / INDEX, index)
    (folder / PROGRESS).unlink(missing_ok=True)
    return index


def _open_index(folder: Path, *, key: str, recipe: Recipe) -> Index:
    """The index of a complete folder, what an interrupted run left of one, or an empty one."""
    for file in (folder / INDEX, folder / PROGRESS):
        if file.is_file():
            index = read_index(file)
            if index.key != key:
                raise DataError(
                    f"'{folder}' holds shards of other text, another tokenizer or other options; "
                    "choose another folder or delete this one"
                )
            return index
    return Index(
        key=key,
        tokenizer=recipe.tokenizer.kind,
        fingerprint=recipe.tokenizer.fingerprint,
        vocab_size=recipe.tokenizer.vocab_size,
        **asdict(recipe.framing),
        splits={split: [] for split in SPLITS},
    )


def _chunks(documents: Documents) -> Iterator[_Chunk]:
    first, texts, chars = 0, [], 0
    for text in documents.read():
        texts.append(text)
        chars += len(text)
        if len(texts) == _CHUNK_DOCUMENTS or chars >= _CHUNK_CHARS:
            yield _Chunk(first, texts)
            first, texts, chars = first + len(texts), [], 0
    if texts:
        yield _Chunk(first, texts)


def _encode(chunk: _Chunk, recipe: Recipe, done: dict[str, int]) -> list[_Document]:
    """Tokenise the documents of a chunk that no closed shard holds: those of number done[split] and above."""
    dtype = token_dtype(recipe.tokenizer.vocab_size)
    documents = []
    for number, text in enumerate(chunk.texts, start=chunk.first):
        if number >= min(done.values()) and number >= done[split := recipe.split_of(text)]:
            tokens = np.array(recipe.framing.wrap(recipe.tokenizer.encode(text)), dtype)
            documents.append(_Document(number, split, tokens, len(text.encode())))
    return documents


def _encoded_chunks(
    documents: Documents, recipe: Recipe, done: dict[str, int], *, workers: int
) -> Iterator[tuple[_Chunk, list[_Document]]]:
    """Chunks in order with their tokens; at most 3 chunks a worker or thread are under way."""
    options = (recipe, done)
    if workers == 1:
        num_tasks = min(8, os.cpu_count() or 1)
        pool = ThreadPoolExecutor(num_tasks)
        encode = partial(_encode, recipe=recipe, done=done)
    else:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=options)
        num_tasks, encode = workers, _encode_in_worker
    pending: deque[tuple[_Chunk, Future[list[_Document]]]] = deque()
    try:
        for chunk in _chunks(documents):
            pending.append((chunk, pool.submit(encode, chunk)))
            if len(pending) >= 3 * num_tasks:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        for chunk, future in pending:
            yield chunk, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process died, perhaps for want of memory; run the same command again to continue, "
            f"with fewer than {workers} workers if it repeats"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# What a worker process keeps between chunks, set once by _start_worker.
_worker_options: tuple[Recipe, dict[str, int]]


def _start_worker(recipe: Recipe, done: dict[str, int]) -> None:
    global _worker_options
    _worker_options = recipe, done
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent was killed: nobody is left to hand it work or tell it to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: _Chunk) -> list[_Document]:
    return _encode(chunk, *_worker_options)
