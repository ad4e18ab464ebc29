"""Writer of token shards: parallel, resumable, and with equal bytes for any number of workers and interruptions.

One process reads documents in order, cuts them into pieces (reading.py), and groups the pieces into chunks. Workers tokenize
chunks. The results come back in order and are appended to the open shard of their split. A full shard gets its final name.
Then progress.json lists the shard, with the documents and pieces read by then. A later run reads the text again, and tokenizes
what no full shard of its split has. Shards end where pieces end, and depend only on the documents and the options. So a run
that is killed anywhere continues to the same bytes. Memory does not depend on the size of documents.

prepare.py (a user's folder) and cache.py (the cache of raw text sources) call this.
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
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from titan.base.signals import child_environment
from titan.base.untrusted import rename
from titan.data import DataError
from titan.data.conversations import Template
from titan.data.reading import Document, pieces_of
from titan.data.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    SPLITS,
    Index,
    Progress,
    Shard,
    read_index,
    require_key,
    token_dtype,
    unfinished_name,
    write_index,
)
from titan.data.sources import Documents, in_validation
from titan.data.special_tokens import SpecialTokens, text_fingerprint
from titan.data.tokenizer import Tokenizer
from titan.data.unread import Counts, count, total

logger = logging.getLogger(__name__)

# Limits of a chunk: large enough to hide the cost of sending it, small enough to keep many chunks in memory.
_CHUNK_PIECES, _CHUNK_CHARS = 256, 2**18

ReadPosition = tuple[int, int]
"""Position of the reader: number of whole documents, and of pieces of the next document, that have been read."""


@dataclass(frozen=True, kw_only=True)
class TokenizationSpec:
    """Settings by which documents become tokens. Workers get them, and the shards depend on them."""

    tokenizer: Tokenizer
    special_tokens: SpecialTokens
    validation_fraction: float
    template: Template | None = None
    """Chat template, if the documents are conversations."""

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the shards, which holds an id and, in a conversation, its kind."""
        return token_dtype(self.tokenizer.vocab_size, kinds=self.template is not None)

    def split_of(self, document: Document) -> str:
        """Return the split that a document belongs to."""
        return SPLITS[in_validation(document, fraction=self.validation_fraction)]

    def key(self, documents: Documents, *, shard_tokens: int) -> str:
        """Return a hash of everything that the shards depend on."""
        ids = text_fingerprint(self.tokenizer, has_chats=self.template is not None)
        # Since rows have tools and weights, too.
        more = [self.template.source, 2] if self.template else []
        parts = [FORMAT, documents.identity, ids, asdict(self.special_tokens), *more]
        text = json.dumps([*parts, self.validation_fraction, shard_tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Piece(NamedTuple):
    """A document or a part of it: number of the document, index of the piece within the document, and its text."""

    number: int
    index: int
    split: str
    text: str
    last: bool
    where: str = ""
    unread: tuple[str, ...] | None = None  # keys of its row; None if the document is no row

    @property
    def place(self) -> ReadPosition:
        return self.number, self.index


class EncodedPiece(NamedTuple):
    """Tokens of a piece, with begin and end ids, and the bytes of text that they stand for."""

    tokens: np.ndarray
    num_bytes: int
    unread: Counts


class SplitWriter:
    """Writer of the shards of one split. The open shard has a temporary name until it is full."""

    def __init__(self, folder: Path, *, split: str, limit: int, index: Index) -> None:
        """Begin after the closed shards in `index`. `limit` is the tokens of a shard."""
        self._folder, self._split, self._limit = folder, split, limit
        self._closed = index.splits[split]
        self._file: BinaryIO | None = None
        last = self._closed[-1] if self._closed else Shard(file=f"{split}-00000.bin")
        self.done: ReadPosition = (last.documents_read, last.pieces_read)
        self._shard = last  # until a piece opens another one

    def add(self, piece: Piece, encoded: EncodedPiece) -> bool:
        """Append a piece. Return whether the open shard had no room for it and was closed."""
        tokens = encoded.tokens
        # A piece that is longer than a shard gets a shard to itself.
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
        if encoded.unread:
            self._shard.unread = total([self._shard.unread, encoded.unread])
        return full

    def close(self, read: ReadPosition) -> None:
        """Rename the open shard to its final name, once its bytes are on disk. `read` is the reader's position."""
        if self._file is None:
            return
        # The bytes must be durable before the name is.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file, path = None, self._folder / self._shard.file
        rename(unfinished_name(path), path)
        self._shard.documents_read, self._shard.pieces_read = read
        self._closed.append(self._shard)


def write_shards(
    documents: Documents,
    *,
    folder: Path,
    spec: TokenizationSpec,
    shard_tokens: int,
    workers: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Index:
    """Tokenize `documents` into `folder`, or continue an interrupted run. The caller must lock the folder.

    Args:
        documents: the text.
        folder: folder of the shards.
        spec: settings by which documents become tokens.
        shard_tokens: tokens of a shard.
        workers: number of processes that tokenize. With 1, this process tokenizes, in threads.
        report: is called with the progress after each chunk.

    Returns:
        The index of the complete folder.

    Raises:
        DataError: the folder has shards of other text or options, a document is unusable, or a worker died.
    """
    # Refuse a folder of other text or options.
    index = open_index(folder, documents, spec=spec, shard_tokens=shard_tokens)
    if (folder / INDEX).is_file():
        return index
    logger.info("tokenizing %s into %s", documents.name, folder)
    # The caller holds the lock, so no other process is writing these files.
    for left_over in folder.glob(".*.json.*"):
        left_over.unlink()
    writers = {
        split: SplitWriter(folder, split=split, limit=shard_tokens, index=index)
        for split in index.splits
    }
    done = {split: writer.done for split, writer in writers.items()}
    progress = Progress()
    chunks = read_chunks(documents, spec, done, progress)
    # Results come in the order of the documents, not in the order in which workers finish.
    for chunk, encoded in encode_all(chunks, spec, workers=workers):
        for piece, one in zip(chunk, encoded, strict=True):
            if writers[piece.split].add(piece, one):
                write_index(folder / PROGRESS, index)
            progress.tokens += len(one.tokens)
        progress.num_bytes = documents.position()
        report(progress)
    for writer in writers.values():
        writer.close((progress.documents, 0))
    index.unread = total(shard.unread for shards in index.splits.values() for shard in shards)
    # Only now is the folder complete.
    write_index(folder / INDEX, index)
    (folder / PROGRESS).unlink(missing_ok=True)
    return index


def open_index(
    folder: Path, documents: Documents, *, spec: TokenizationSpec, shard_tokens: int
) -> Index:
    """Return the index of a complete folder, of an interrupted run, or an empty index."""
    key = spec.key(documents, shard_tokens=shard_tokens)
    for file in (folder / INDEX, folder / PROGRESS):
        if file.is_file():
            index = read_index(file)
            require_key(index.key, key, folder)
            return index
    return Index(
        key=key,
        tokenizer=spec.tokenizer.kind,
        fingerprint=text_fingerprint(spec.tokenizer, has_chats=spec.template is not None),
        vocab_size=spec.tokenizer.vocab_size,
        kinds=spec.template is not None,
        **asdict(spec.special_tokens),
        splits={split: [] for split in SPLITS},
    )


def read_chunks(
    documents: Documents,
    spec: TokenizationSpec,
    done: dict[str, ReadPosition],
    progress: Progress,
) -> Iterator[list[Piece]]:
    """Yield the pieces that no shard contains yet, in chunks: each split's pieces from done[split] on. Count the documents."""
    chunk, num_chars = [], 0
    for number, document in enumerate(documents.read()):
        progress.documents = number + 1
        # Both splits already contain this document: skip it.
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


def _pieces(document: Document, *, number: int, split: str) -> Iterator[Piece]:
    texts = pieces_of(document)
    text, index = next(texts, None), 0
    unread = getattr(document, "unread", None)
    while text is not None:
        # Look one piece ahead: the end token follows the last piece.
        following = next(texts, None)
        where = getattr(document, "where", "")
        yield Piece(number, index, split, text, following is None, where, unread)
        text, index, unread = following, index + 1, None


def encode_documents(chunk: list[Piece], spec: TokenizationSpec) -> list[EncodedPiece]:
    """Encode pieces of documents."""
    encoded = []
    for piece in chunk:
        unread, keys = Counts(), [*(piece.unread or ())]
        if spec.template is not None:
            chat = json.loads(piece.text)
            keys += spec.template.unread_beside(chat)
            framed = spec.template.encode(chat, where=piece.where, unread=unread)
        else:
            encode = spec.tokenizer.encode_rest if piece.index else spec.tokenizer.encode
            ids = encode(piece.text)
            framed = spec.special_tokens.wrap(ids, first=piece.index == 0, last=piece.last)
        if piece.unread is not None:
            count(unread, "rows", keys)
        # The bytes of text give the compression of a shard.
        encoded.append(
            EncodedPiece(np.array(framed, spec.dtype), len(piece.text.encode()), unread)
        )
    return encoded


def unread_of(documents: Documents, spec: TokenizationSpec, *, count: int) -> Counts:
    """Return the counts of the first documents, which are encoded as all others."""
    first = islice(documents.read(), count)
    pieces = [next(_pieces(document, number=0, split=SPLITS[0])) for document in first]
    return total(encoded.unread for encoded in encode_documents(pieces, spec))


def encode_all(
    chunks: Iterator[list[Piece]], spec: TokenizationSpec, *, workers: int
) -> Iterator[tuple[list[Piece], list[EncodedPiece]]]:
    """Yield the chunks in order with their tokens. At most 3 chunks for each worker or thread are in flight."""
    # With workers, each gets a thread. Without workers, threads tokenize, since tokenizers release the interpreter's lock.
    num_tasks = min(8, os.cpu_count() or 1) if workers == 1 else workers
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    encode = partial(encode_documents, spec=spec)
    # With workers, each thread below only waits for a worker.
    started: list[_Worker] = []
    if workers > 1:
        encode = partial(_encode_in_any, idle)
    pool = ThreadPoolExecutor(num_tasks)
    pending: deque[tuple[list[Piece], Future[list[EncodedPiece]]]] = deque()
    try:
        for chunk in chunks:
            # A short text needs few. Here, since a worker ends with the thread that starts it.
            if len(started) < workers > 1:
                started.append(_Worker(spec))
                idle.put(started[-1])
            pending.append((chunk, pool.submit(encode, chunk)))
            # Take the oldest chunk first: the queue is bounded, and keeps the order.
            while pending and (len(pending) >= 3 * num_tasks or pending[0][1].done()):
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    except WorkerDied as error:
        raise DataError(
            f"a tokenizing process {error}; run the same command again to continue"
        ) from error
    finally:
        # Stop the workers first, since threads may wait for their answers.
        for worker in started:
            worker.close()
        pool.shutdown(cancel_futures=True)


class WorkerDied(Exception):
    """Error of a worker process that ended before it was asked to."""


class _Worker:
    """Process that tokenizes chunks. It ends with this process, because its input is a pipe from here.

    It is not started by multiprocessing, which would import the calling program: a user's script, or all of torch.
    """

    def __init__(self, spec: TokenizationSpec) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from titan.base.signals import die_with_launcher; "
        # Before the imports, which take seconds.
        code += "die_with_launcher(); from titan.data.writer import work; work()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout
        self._send(spec)

    def _send(self, value: object) -> None:
        pickle.dump(value, self._tasks)
        self._tasks.flush()

    def encode(self, chunk: list[Piece]) -> list[EncodedPiece]:
        """Return the chunk's tokens. Raise WorkerDied if the process has ended."""
        try:
            self._send(chunk)
            answer = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerDied(_describe_end(self._process.wait())) from error
        if isinstance(answer, DataError):
            raise answer
        return answer

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()  # it may still start, or compute what nobody waits for
        self._process.wait()
        self._answers.close()
        with suppress(OSError):
            self._tasks.close()


def _describe_end(code: int) -> str:
    """Return how a worker with this exit code ended."""
    if code == -signal.SIGKILL:
        return "was killed, perhaps because memory ran out (then give fewer --workers)"
    return (
        f"ended by {signal.Signals(-code).name}"
        if code < 0
        else f"failed with exit code {code}, and says why above"
    )


def _encode_in_any(idle: queue.SimpleQueue[_Worker], chunk: list[Piece]) -> list[EncodedPiece]:
    worker = idle.get()
    try:
        return worker.encode(chunk)
    finally:
        idle.put(worker)


def work() -> None:
    """Tokenize the chunks that arrive on standard input, in a worker process, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process that started this one handles them
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    spec: TokenizationSpec = pickle.load(sys.stdin.buffer)
    with suppress(EOFError, BrokenPipeError):
        while True:
            chunk = pickle.load(sys.stdin.buffer)
            try:
                answer = encode_documents(chunk, spec)
            except DataError as error:  # a conversation is unusable
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
