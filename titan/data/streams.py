"""Samples of text that is read while training. Each data-parallel rank has its own part of the stream.

`datasets` splits a stream by rank, so a rank reads and tokenizes only its own documents. They are numbered as they come,
epoch after epoch, and concatenated. A sample begins at every seq_len tokens of the result. So the samples of a rank are a
function of the stream, the rank and the number of ranks. Shuffling permutes blocks of `shuffle_buffer` documents by a key of
(seed, epoch, block).

`bookmark()` records the document in which the next sample begins, and the place from which the reader can reach it. A resumed
rank continues from its bookmark.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from titan.data import DataError
from titan.data.base import Source, State
from titan.data.order import derive_key, permute
from titan.data.sources import TextStream
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNSHUFFLED_BLOCK = 1024  # documents between two places from which the reader can resume
# Tokenizers release the interpreter's lock, so threads help. Ranks share the cores, so each rank takes few.
_THREADS, _DOCUMENTS_AT_ONCE = 4, 64


class Bookmark(NamedTuple):
    """Place from which the reader can resume.

    Attributes:
        document: number of the next document.
        epoch: epoch of the next block.
        block: number of the next block in its epoch.
        state: the dataset's state before that block, or None for the beginning of an epoch.
    """

    document: int = 0
    epoch: int = 0
    block: int = 0
    state: State | None = None


class StreamSamples(Source):
    """Samples of a rank's part of a stream. Each call returns the next samples, whatever their numbers."""

    def __init__(
        self,
        stream: TextStream,
        *,
        tokenizer: Tokenizer,
        special_tokens: SpecialTokens,
        seq_len: int,
        shuffle_buffer: int,
        seed: int,
        keep: Callable[[str], bool] = lambda text: True,
        identity: int = 0,
    ) -> None:
        """Begin at the first sample.

        Args:
            stream: the rank's part of the dataset.
            tokenizer: the tokenizer of the text.
            special_tokens: ids that begin and end a document.
            seq_len: inputs of a sample, which has one token more.
            shuffle_buffer: documents of a block that is shuffled. 0 keeps their order.
            seed: selects the order in each block.
            keep: returns whether a document belongs to the wanted split.
            identity: hash of everything that the samples depend on. A bookmark with another identity is not used.
        """
        self.special_tokens = special_tokens
        self._stream, self._tokenizer, self._seq_len = stream, tokenizer, seq_len
        self._keep, self._seed, self._identity = keep, seed, identity
        self._shuffled = shuffle_buffer > 0
        self._block_size = shuffle_buffer or _UNSHUFFLED_BLOCK
        self._pool = ThreadPoolExecutor(_THREADS)
        self.seek(0)

    def seek(self, position: int, *, bookmark: Any = None) -> None:
        fits = bool(bookmark) and bookmark.get("identity") == self._identity
        if position and not fits:
            logger.warning("no bookmark for %s: it is read from its start", self._stream.name)
        place = bookmark if fits else {"document": 0, "offset": 0, "mark": []}
        self._offset, first = place["offset"], place["document"]
        mark = Bookmark(*place["mark"])
        self._marks = deque([mark])  # places passed, oldest first; `bookmark` drops old ones
        self._next_document = first
        # Documents with unused tokens, each with its number, and the number of tokens in these documents.
        self._documents: deque[tuple[int, np.ndarray]] = deque()
        self._num_tokens = 0
        self._source = self._encoded(item for item in self.numbered(mark) if item[0] >= first)

    def bookmark(self) -> State:
        """Return the place where the next sample begins, as JSON-able values, and a place from which the reader can reach it."""
        # The oldest document with unused tokens, or the next document if there is none.
        document = self._documents[0][0] if self._documents else self._next_document
        while len(self._marks) > 1 and self._marks[1].document <= document:
            self._marks.popleft()
        place = {"document": document, "offset": self._offset}
        return {"identity": self._identity, **place, "mark": list(self._marks[0])}

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._take() for _ in indices])

    def _take(self) -> np.ndarray:
        """Return the next seq_len + 1 tokens. The last one is also the first token of the next sample."""
        # seq_len inputs need one token more, for the last label.
        while self._num_tokens - self._offset <= self._seq_len:
            number, ids = next(self._source)
            self._next_document = number + 1
            self._documents.append((number, ids))
            self._num_tokens += len(ids)
        # Start at the offset in the first document, and go on through the next documents.
        parts, missing, begin = [], self._seq_len + 1, self._offset
        for _, ids in self._documents:
            parts.append(ids[begin : begin + missing])
            missing -= len(parts[-1])
            begin = 0
            if not missing:
                break
        self._offset += self._seq_len
        # Drop documents without unused tokens. The last token stays, since the next sample begins with it.
        while self._offset >= len(self._documents[0][1]):
            length = len(self._documents.popleft()[1])
            self._offset -= length
            self._num_tokens -= length
        return np.concatenate(parts)

    def _encoded(self, numbered: Iterator[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number and the framed ids of each document. Several documents are tokenized at once."""
        # A chunk is large enough for every thread, and small enough to stay near the reader's place.
        while chunk := list(islice(numbered, _DOCUMENTS_AT_ONCE)):
            numbers, texts = zip(*chunk, strict=True)
            yield from zip(numbers, self._pool.map(self.encode, texts), strict=True)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.special_tokens.wrap(self._tokenizer.encode(text)), dtype=np.int64)

    def numbered(self, mark: Bookmark) -> Iterator[tuple[int, str]]:
        """Yield the documents from `mark` on with their numbers, epoch after epoch, without end."""
        number, epoch, block, state = mark
        while True:
            is_whole_epoch, first = not block, number
            texts = self._stream.read(state)
            while raw := list(islice(texts, self._block_size)):
                # Record the state now, since the reader may be further when the block is used up.
                state, order = self._stream.state(), np.arange(len(raw))
                if self._shuffled:
                    key = derive_key(self._seed, "stream", epoch, block)
                    order = permute(order, length=len(raw), key=key)
                for place in order:
                    if self._keep(raw[place]):
                        yield number, raw[place]
                        number += 1
                block += 1
                self._marks.append(Bookmark(number, epoch, block, state))
            if is_whole_epoch and number == first:
                raise DataError(f"dataset {self._stream.name} has no documents for this split")
            epoch, block, state = epoch + 1, 0, None
            self._marks.append(Bookmark(number, epoch))
