"""Writing token shards: parallel, resumable, and the same bytes for any number of workers and interruptions.

One process reads documents in order and cuts them into chunks; workers tokenise chunks; results come back in order
and are appended to the open shard of their split. A shard that is full goes from its temporary to its final
name, then progress.json records, for each split, its shards and the number of documents read when the last was
closed. A later run reads from the start but tokenises only what no closed shard holds. Shards end at document
ends and depend on nothing but the documents and the options, so a run killed anywhere continues to the same bytes.

Called by prepare.py (a user's folder) and cache.py (the cache of raw text sources).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from titan.config.sections import TokenizerSection
from titan.data.errors import DataError
from titan.data.packing import Framing
from titan.data.shards import (
    FORMAT,
    INDEX,
    SPLITS,
    Index,
    Shard,
    read_index,
    temporary_name,
    token_dtype,
    write_index,
    write_json,
)
from titan.data.sources import Documents, in_validation
from titan.data.tokenizer import Tokenizer, build_tokenizer

PROGRESS = "progress.json"
# For each split, the number of documents read when its last shard was closed: those need no work again.
_Done: TypeAlias = dict[str, int]
# Of a chunk: large enough to hide the hand-over, small enough to keep few in memory.
_CHUNK_DOCUMENTS, _CHUNK_CHARS = 256, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How documents become tokens: what a worker needs, and what the result depends on besides the text."""

    tokenizer: Tokenizer
    framing: Framing
    validation_fraction: float

    def key(self, documents: Documents, *, shard_tokens: int) -> str:
        parts = [FORMAT, documents.identity, self.tokenizer.fingerprint, asdict(self.framing)]
        text = json.dumps([*parts, self.validation_fraction, shard_tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Progress:
    """What was done so far; for the display."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    shards: int = 0


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


def _encode(chunk: _Chunk, recipe: Recipe, done: _Done, *, num_threads: int) -> list[_Document]:
    """Tokenise the documents of a chunk that no closed shard holds."""
    fraction, dtype = recipe.validation_fraction, token_dtype(recipe.tokenizer.vocab_size)
    wanted: list[tuple[int, str, str]] = []
    for number, text in enumerate(chunk.texts, start=chunk.first):
        if number >= min(done.values()):
            split = SPLITS[in_validation(text, fraction=fraction)]
            wanted += [(number, split, text)] if number >= done[split] else []
    encoded = recipe.tokenizer.encode_batch([text for *_, text in wanted], num_threads=num_threads)
    return [
        _Document(
            number, split, np.array(recipe.framing.wrap(ids), dtype=dtype), len(text.encode())
        )
        for (number, split, text), ids in zip(wanted, encoded, strict=True)
    ]


class _SplitWriter:
    """The shards of one split; the open one has a temporary name until it is full."""

    def __init__(self, folder: Path, *, split: str, limit: int, closed: list[Shard]) -> None:
        self.closed = closed
        self._folder, self._split, self._limit = folder, split, limit
        self._file: BinaryIO | None = None
        self._tokens = self._documents = self._bytes = 0

    def add(self, document: _Document) -> bool:
        """Append a document; True where that closed the shard before it, which had no room for it."""
        full = self._tokens > 0 and self._tokens + len(document.tokens) > self._limit
        if full:
            self.close()
        if self._file is None:
            self._file = temporary_name(self._path()).open("wb")
        self._file.write(document.tokens.tobytes())
        self._tokens += len(document.tokens)
        self._documents += 1
        self._bytes += document.num_bytes
        return full

    def close(self) -> None:
        """Give the open shard its final name, after its bytes are on disk."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        path = self._path()
        temporary_name(path).replace(path)
        counts = {"tokens": self._tokens, "documents": self._documents, "bytes": self._bytes}
        self.closed.append(Shard(file=path.name, **counts))
        self._tokens = self._documents = self._bytes = 0

    def _path(self) -> Path:
        return self._folder / f"{self._split}-{len(self.closed):05d}.bin"


def _load_progress(folder: Path, *, key: str) -> tuple[_Done, dict[str, list[Shard]]]:
    """Documents done and shards closed of each split, as an interrupted run left them."""
    file = folder / PROGRESS
    if not file.is_file():
        return dict.fromkeys(SPLITS, 0), {split: [] for split in SPLITS}
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["key"] != key:
        raise _other_content(folder)
    return content["done"], {
        name: [Shard(**shard) for shard in shards] for name, shards in content["splits"].items()
    }


def _save_progress(folder: Path, *, key: str, done: _Done, closed: dict[str, list[Shard]]) -> None:
    splits = {split: [asdict(shard) for shard in shards] for split, shards in closed.items()}
    write_json(folder / PROGRESS, {"key": key, "done": done, "splits": splits})


def _other_content(folder: Path) -> DataError:
    return DataError(
        f"'{folder}' holds shards of other text, another tokenizer or other options; "
        "choose another folder or delete this one"
    )


def write_shards(
    documents: Documents,
    *,
    folder: Path,
    recipe: Recipe,
    shard_tokens: int,
    workers: int = 0,
    tokenizer_section: TokenizerSection | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Index:
    """Tokenise `documents` into `folder`, or continue; the caller keeps other processes away.

    workers: processes that tokenise; each builds its tokenizer from `tokenizer_section`. 0: this process does,
    with threads.
    """
    key = recipe.key(documents, shard_tokens=shard_tokens)
    if (folder / INDEX).is_file():
        index = read_index(folder)
        if index.key != key:
            raise _other_content(folder)
        return index
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("*.tmp"):
        left_over.unlink(missing_ok=True)
    done, closed = _load_progress(folder, key=key)
    progress = Progress(shards=sum(map(len, closed.values())))
    writers = {
        split: _SplitWriter(folder, split=split, limit=shard_tokens, closed=closed[split])
        for split in SPLITS
    }
    chunks = _encoded_chunks(
        documents, recipe, dict(done), workers=workers, section=tokenizer_section
    )
    for chunk, encoded in chunks:
        for document in encoded:
            if writers[document.split].add(document):
                done[document.split] = document.number
                progress.shards += 1
                _save_progress(folder, key=key, done=done, closed=closed)
            progress.tokens += len(document.tokens)
        progress.documents = chunk.first + len(chunk.texts)
        progress.text_bytes += sum(map(len, chunk.texts))
        report(progress)
    for writer in writers.values():
        writer.close()
    index = _make_index(key, recipe, closed)
    write_index(folder, index)
    (folder / PROGRESS).unlink(missing_ok=True)
    return index


def _make_index(key: str, recipe: Recipe, splits: dict[str, list[Shard]]) -> Index:
    return Index(
        key=key,
        tokenizer=recipe.tokenizer.kind,
        fingerprint=recipe.tokenizer.fingerprint,
        vocab_size=recipe.tokenizer.vocab_size,
        bos_id=recipe.framing.bos_id,
        eos_id=recipe.framing.eos_id,
        splits={split: shards for split, shards in splits.items() if shards},
    )


def _encoded_chunks(
    documents: Documents,
    recipe: Recipe,
    done: _Done,
    *,
    workers: int,
    section: TokenizerSection | None,
) -> Iterator[tuple[_Chunk, list[_Document]]]:
    """Chunks in order with their tokens; at most 3 chunks a worker are under way."""
    if not workers:
        for chunk in _chunks(documents):
            yield chunk, _encode(chunk, recipe, done, num_threads=min(8, os.cpu_count() or 1))
        return
    assert section is not None, "workers build their tokenizer from a section"
    options = (section, recipe.framing, recipe.validation_fraction, done)
    pending: deque[tuple[_Chunk, Future[list[_Document]]]] = deque()
    context = multiprocessing.get_context("spawn")  # a fork would copy locks of running threads
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=options
    )
    try:
        for chunk in _chunks(documents):
            pending.append((chunk, pool.submit(_work, chunk)))
            if len(pending) >= 3 * workers:
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
        pool.shutdown(wait=True, cancel_futures=True)


# What a worker process keeps between chunks, set once by _start_worker.
_worker_state: tuple[Recipe, _Done] | None = None


def _start_worker(
    section: TokenizerSection, framing: Framing, fraction: float, done: _Done
) -> None:
    global _worker_state
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    tokenizer = build_tokenizer(section, hf_assets_path="")
    _worker_state = Recipe(tokenizer=tokenizer, framing=framing, validation_fraction=fraction), done


def _exit_with_parent() -> None:
    """End this worker when its parent was killed: nobody is left to hand it work or tell it to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: _Chunk) -> list[_Document]:
    assert _worker_state is not None
    recipe, done = _worker_state
    return _encode(chunk, recipe, done, num_threads=1)
