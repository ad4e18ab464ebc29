"""Write token shards: in parallel, resumable, and the same bytes for any number of workers and interruptions.

One process reads documents in order, cuts them into pieces (reading.py), and groups these into chunks. Workers tokenize
chunks. The results come back in order and are appended to the open shard of their split. A full shard gets its final name.
Then progress.json names it, with the documents and pieces read by then, and how much of each open shard is on disk. A later
run goes on there. It begins to read at the file, or the row group of Parquet, where reading was. Shards end where pieces
end, and depend only on the documents and the options. So a run that is killed anywhere continues to the same bytes. Memory
does not depend on the size of documents.

Called by prepare.py (a user's folder) and cache.py (the cache of raw text sources).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from titan.data import DataError
from titan.data.chat import ChatTemplate
from titan.data.reading import Document, pieces_of
from titan.data.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    SPLITS,
    Index,
    Shard,
    read_index,
    token_dtype,
    unfinished_name,
    write_index,
)
from titan.data.sources import Documents, in_validation
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Limits of a chunk: large enough to hide the cost of handing it over, small enough to keep many in memory.
_CHUNK_PIECES, _CHUNK_CHARS = 256, 2**18

ReadPosition = tuple[int, int]
"""How far reading has come: so many documents, and so many pieces of the next one."""


@dataclass(frozen=True, kw_only=True)
class TokenizationSpec:
    """Say how documents become tokens: what a worker needs, and what the result depends on besides
    the text."""

    tokenizer: Tokenizer
    special_tokens: SpecialTokens
    validation_fraction: float
    template: ChatTemplate | None = None
    """Of documents that are conversations."""

    @property
    def dtype(self) -> np.dtype:
        """Return what holds an id, of a conversation with its kind."""
        return token_dtype(self.tokenizer.vocab_size, kinds=self.template is not None)

    def split_of(self, document: Document) -> str:
        """Return the split that a document belongs to."""
        return SPLITS[in_validation(document, fraction=self.validation_fraction)]

    def key(self, documents: Documents, *, shard_tokens: int) -> str:
        """Return a hash of all that the shards depend on."""
        # Everything that the bytes of the result depend on.
        parts = [
            FORMAT,
            documents.identity,
            self.tokenizer.fingerprint,
            asdict(self.special_tokens),
            *([self.template.source] if self.template else []),
        ]
        text = json.dumps([*parts, self.validation_fraction, shard_tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Progress:
    """Hold what is done so far, for the display. num_bytes: of the files, as `Documents.position`
    counts them."""

    documents: int = 0
    num_bytes: int = 0
    tokens: int = 0
    bytes_before: int = 0
    """What earlier runs have read, and this one passes over."""


class _Piece(NamedTuple):
    """A document or a part of one. number: its document's. index: its own, within the document."""

    number: int
    index: int
    split: str
    text: str
    last: bool
    where: str = ""

    @property
    def place(self) -> ReadPosition:
        return self.number, self.index


class _Encoded(NamedTuple):
    """A piece's tokens, with begin and end ids, and how many bytes of text they stand for."""

    tokens: np.ndarray
    num_bytes: int


class _SplitWriter:
    """Write the shards of one split, and list them in `closed`. The open one has a temporary name until it is full."""

    def __init__(self, folder: Path, *, split: str, limit: int, index: Index) -> None:
        """Begin after the closed shards in `index`, with the tokens of the open one. limit: tokens of a shard."""
        self._folder, self._split, self._limit = folder, split, limit
        self._closed = index.splits[split]
        self._file: BinaryIO | None = None
        self._shard = index.open.get(split, Shard(file=f"{split}-00000.bin"))
        # progress.json of an earlier titan has no open shards: then the last closed one counts.
        last = self._shard if split in index.open else [self._shard, *self._closed][-1]
        self.done: ReadPosition = (last.documents_read, last.pieces_read)
        if self._shard.tokens:
            path = unfinished_name(folder / self._shard.file)
            # What came after progress.json is written again.
            os.truncate(path, self._shard.tokens * np.dtype(index.dtype).itemsize)
            self._file = path.open("ab")

    def add(self, piece: _Piece, encoded: _Encoded) -> bool:
        """Append a piece. Return whether the open shard had no room for it and was closed."""
        tokens = encoded.tokens
        # A piece longer than a shard gets one to itself.
        full = self._file is not None and self._shard.tokens + len(tokens) > self._limit
        if full:
            self.close(piece.place)
        if self._file is None:
            self._shard = Shard(file=f"{self._split}-{len(self._closed):05d}.bin")
            self._file = unfinished_name(self._folder / self._shard.file).open("wb")
        self._file.write(tokens.tobytes())
        self._shard.tokens += len(tokens)
        self._shard.documents += piece.last
        self._shard.bytes += encoded.num_bytes
        return full

    def close(self, read: ReadPosition) -> None:
        """Give the open shard, if there is one, its final name, once its bytes are on disk. read: the reader's position."""
        if self._file is None:
            return
        # The bytes have to be durable before the name is.
        self._closed.append(self.written(read))
        self._file.close()
        self._file, path = None, self._folder / self._shard.file
        unfinished_name(path).replace(path)
        self._shard = Shard(file=path.name)

    def written(self, read: ReadPosition) -> Shard:
        """Return the open shard, once its bytes are on disk. read: the reader's position."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        documents, pieces = read
        return self._shard.model_copy(update={"documents_read": documents, "pieces_read": pieces})


def write_shards(
    documents: Documents,
    *,
    folder: Path,
    spec: TokenizationSpec,
    shard_tokens: int,
    workers: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Index:
    """Tokenize `documents` into `folder`, or continue. The caller keeps other processes away.

    Args:
        workers: processes that tokenize. With 1, this process tokenizes, with threads.
        report: is called with the progress after each chunk.
    """
    # Refuses a folder of other text or options.
    index = _open_index(folder, key=spec.key(documents, shard_tokens=shard_tokens), spec=spec)
    if (folder / INDEX).is_file():
        return index
    logger.info("tokenizing %s into %s", documents.name, folder)
    # The caller holds the lock, so nobody is writing these.
    for left_over in folder.glob("*.tmp"):
        left_over.unlink()
    writers = {
        split: _SplitWriter(folder, split=split, limit=shard_tokens, index=index)
        for split in index.splits
    }
    done = {split: writer.done for split, writer in writers.items()}
    progress = Progress()
    places = deque([index.place or [0]])
    chunks = _chunks(documents, spec, done, progress, places)
    # Results come in the order of the documents, whichever worker was first.
    for chunk, encoded in _encode_all(chunks, spec, workers=workers):
        for piece, one in zip(chunk, encoded, strict=True):
            if writers[piece.split].add(piece, one):
                after = (piece.number, piece.index + 1)
                index.open = {split: writer.written(after) for split, writer in writers.items()}
                while len(places) > 1 and places[1][0] <= piece.number:
                    places.popleft()
                index.place = places[0]
                write_index(folder / PROGRESS, index)
            progress.tokens += len(one.tokens)
        progress.num_bytes = documents.position()
        report(progress)
    for writer in writers.values():
        writer.close((progress.documents, 0))
    # Only now is the folder complete.
    write_index(folder / INDEX, index)
    (folder / PROGRESS).unlink(missing_ok=True)
    return index


def _open_index(folder: Path, *, key: str, spec: TokenizationSpec) -> Index:
    """Return the index of a complete folder, or what an interrupted run has left of it, or an empty one."""
    for file in (folder / INDEX, folder / PROGRESS):
        if file.is_file():
            index = read_index(file)
            if index.key != key:
                raise DataError(
                    f"'{folder}' holds shards of other text, another tokenizer or other options; "
                    "choose another folder or delete this one"
                )
            size = np.dtype(index.dtype).itemsize
            for shard in index.open.values():
                path = unfinished_name(folder / shard.file)
                # It was closed after progress.json was written: go on as if no shard were open.
                if shard.tokens and not (
                    path.is_file() and path.stat().st_size >= shard.tokens * size
                ):
                    index.open, index.place = {}, []
            return index
    return Index(
        key=key,
        tokenizer=spec.tokenizer.kind,
        fingerprint=spec.tokenizer.fingerprint,
        vocab_size=spec.tokenizer.vocab_size,
        kinds=spec.template is not None,
        **asdict(spec.special_tokens),
        splits={split: [] for split in SPLITS},
    )


def _chunks(
    documents: Documents,
    spec: TokenizationSpec,
    done: dict[str, ReadPosition],
    progress: Progress,
    places: deque[list[int]],
) -> Iterator[list[_Piece]]:
    """Yield the pieces that no shard holds: those of a split from done[split] on. Count the documents.

    Reading begins at places[0]: a document's number, and where it is. Each later place is added with its first document.
    """
    chunk, num_chars = [], 0
    first, *place = places[0]
    for number, document in enumerate(documents.read(*place), first):
        progress.documents = number + 1
        progress.bytes_before = progress.bytes_before or (number == first and documents.position())
        if places[-1][1:] != (here := [*documents.place()]):
            places.append([number, *here])
        # Before this document, both splits are complete: it is only read.
        if number < min(done.values())[0]:
            continue
        split = spec.split_of(document)
        for piece in _pieces(document, number=number, split=split):
            if piece.place < done[split]:
                continue
            chunk.append(piece)
            num_chars += len(piece.text)
            if len(chunk) == _CHUNK_PIECES or num_chars >= _CHUNK_CHARS:
                yield chunk
                chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _pieces(document: Document, *, number: int, split: str) -> Iterator[_Piece]:
    texts = pieces_of(document)
    text, index = next(texts, None), 0
    while text is not None:
        # One piece ahead: the last one is followed by the end token.
        following = next(texts, None)
        where = getattr(document, "where", "")
        yield _Piece(number, index, split, text, last=following is None, where=where)
        text, index = following, index + 1


def _encode(chunk: list[_Piece], spec: TokenizationSpec) -> list[_Encoded]:
    encoded = []
    for piece in chunk:
        if spec.template is not None:
            framed: Any = spec.template.encode(json.loads(piece.text), where=piece.where)
        else:
            encode = spec.tokenizer.encode_rest if piece.index else spec.tokenizer.encode
            ids = encode(piece.text)
            framed = spec.special_tokens.wrap(ids, first=piece.index == 0, last=piece.last)
        # Bytes of text, so that a shard's compression can be stated.
        encoded.append(_Encoded(np.array(framed, spec.dtype), len(piece.text.encode())))
    return encoded


def _encode_all(
    chunks: Iterator[list[_Piece]], spec: TokenizationSpec, *, workers: int
) -> Iterator[tuple[list[_Piece], list[_Encoded]]]:
    """Yield the chunks in order with their tokens. At most 3 chunks a worker or thread are under way."""
    # With workers, one thread for each; without, tokenizers release the interpreter's lock, so
    # threads help.
    num_tasks = min(8, os.cpu_count() or 1) if workers == 1 else workers
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    encode = partial(_encode, spec=spec)
    # With workers, each thread below only waits for one of them.
    started = [_Worker(spec) for _ in range(workers)] if workers > 1 else []
    if started:
        for worker in started:
            idle.put(worker)
        encode = partial(_encode_in_any, idle)
    pool = ThreadPoolExecutor(num_tasks)
    pending: deque[tuple[list[_Piece], Future[list[_Encoded]]]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(encode, chunk)))
            # The oldest first: a bounded queue that keeps the order.
            while pending and (len(pending) >= 3 * num_tasks or pending[0][1].done()):
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    except WorkerDied as error:
        raise DataError(
            f"a tokenizing process died ({error}), perhaps because memory ran out; run the same command again to "
            f"continue, with fewer than {workers} workers if it repeats"
        ) from error
    finally:
        # First the threads, which may be waiting for a worker's answer, then the workers.
        pool.shutdown(cancel_futures=True)
        for worker in started:
            worker.close()


class WorkerDied(Exception):
    """Report that a worker process ended before it was asked to."""


class _Worker:
    """A process that tokenizes chunks, and ends when this one does, because its input is a pipe from here.

    It is not one of multiprocessing's, which would import the calling program: a user's script, or all of torch.
    """

    def __init__(self, spec: TokenizationSpec) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from titan.data.writer import work; work()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._send(spec)

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin)
        self._process.stdin.flush()

    def encode(self, chunk: list[_Piece]) -> list[_Encoded]:
        """Return the chunk's tokens. Raises WorkerDied."""
        assert self._process.stdout is not None
        try:
            self._send(chunk)
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerDied(f"exit code {self._process.wait()}") from error
        if isinstance(answer, DataError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _encode_in_any(idle: queue.SimpleQueue[_Worker], chunk: list[_Piece]) -> list[_Encoded]:
    worker = idle.get()
    try:
        return worker.encode(chunk)
    finally:
        idle.put(worker)


def work() -> None:
    """Tokenize what comes through standard input, in a worker process, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process that started this one handles them
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    spec: TokenizationSpec = pickle.load(sys.stdin.buffer)
    with suppress(EOFError, BrokenPipeError):
        while True:
            chunk = pickle.load(sys.stdin.buffer)
            try:
                answer = _encode(chunk, spec)
            except DataError as error:  # of a conversation
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
