"""Pack text that is read while training. Each data-parallel rank has a part of the stream for itself.

`datasets` splits a stream by rank, so a rank reads and tokenizes its documents only. They are numbered as they come, epoch
after epoch, and laid one after another. A rank's samples follow one another at every seq_len tokens of that row. So what a
rank trains on is a function of the stream, the rank and the number of ranks. Shuffling permutes blocks of `shuffle_buffer`
documents by a key of (seed, epoch, block).

`bookmark()` records in which document the next sample begins and from where the reader can go on to it. A resumed rank goes on
from its bookmark.
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
from titan.data.base import Source
from titan.data.order import derive_key, permute
from titan.data.sources import TextStream
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNSHUFFLED_BLOCK = 1024  # documents between two places from which the reader can go on
# Tokenizers release the interpreter's lock. Ranks share the cores, so each takes few.
_THREADS, _DOCUMENTS_AT_ONCE = 4, 64


class Mark(NamedTuple):
    """Mark a place to go on reading: before block `block` of `epoch`, after `document` documents."""

    document: int = 0
    epoch: int = 0
    block: int = 0
    state: dict[str, Any] | None = None


class StreamSamples(Source):
    """Give a rank's samples of a stream: each call the next ones, whatever their numbers."""

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
            shuffle_buffer: documents of a block that is shuffled; 0 leaves their order.
            keep: whether a document belongs to the wanted split.
            identity: names all that the samples depend on. A bookmark of another identity is not used.
        """
        self.special_tokens = special_tokens
        self._stream, self._tokenizer, self._seq_len = stream, tokenizer, seq_len
        self._keep, self._seed, self._identity = keep, seed, identity
        self._shuffled, self._block_size = shuffle_buffer > 0, shuffle_buffer or _UNSHUFFLED_BLOCK
        self._pool = ThreadPoolExecutor(_THREADS)
        self.seek(0)

    def seek(self, position: int, *, bookmark: Any = None) -> None:
        fits = bool(bookmark) and bookmark.get("identity") == self._identity
        if position and not fits:
            logger.warning("no bookmark for %s: it is read from its start", self._stream.name)
        place = bookmark if fits else {"document": 0, "offset": 0, "mark": []}
        self._offset, first = place["offset"], place["document"]
        mark = Mark(*place["mark"])
        self._marks = deque([mark])  # places passed, oldest first; `bookmark` drops what is behind
        self._next_document = first
        # Documents whose tokens are not used up yet, with their numbers, and how many tokens these are.
        self._documents: deque[tuple[int, np.ndarray]] = deque()
        self._num_tokens = 0
        self._source = self._encoded(item for item in self._numbered(mark) if item[0] >= first)

    def bookmark(self) -> dict[str, Any]:
        """Return where the next sample begins, and the newest place from which it can be reached. JSON-able."""
        # The oldest document with unused tokens, or the next one if all are used up.
        document = self._documents[0][0] if self._documents else self._next_document
        while len(self._marks) > 1 and self._marks[1].document <= document:
            self._marks.popleft()
        place = {"document": document, "offset": self._offset}
        return {"identity": self._identity, **place, "mark": list(self._marks[0])}

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._take() for _ in indices])

    def _take(self) -> np.ndarray:
        """Return the next seq_len + 1 tokens. The last of them is the first of the next sample."""
        # One token beyond the sample, the last label, must be there too.
        while self._num_tokens - self._offset <= self._seq_len:
            number, ids = next(self._source)
            self._next_document = number + 1
            self._documents.append((number, ids))
            self._num_tokens += len(ids)
        # From the current offset in the first document on, through as many as it takes.
        parts, missing, begin = [], self._seq_len + 1, self._offset
        for _, ids in self._documents:
            parts.append(ids[begin : begin + missing])
            missing -= len(parts[-1])
            begin = 0
            if not missing:
                break
        self._offset += self._seq_len
        # Drop documents whose tokens are used up. The last token stays: the next sample begins with it.
        while self._offset >= len(self._documents[0][1]):
            length = len(self._documents.popleft()[1])
            self._offset -= length
            self._num_tokens -= length
        return np.concatenate(parts)

    def _encoded(self, numbered: Iterator[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the documents' numbers and framed ids, some of them tokenized at once."""
        # Documents at once: enough for every thread, few enough to stay near the reader's place.
        while chunk := list(islice(numbered, _DOCUMENTS_AT_ONCE)):
            numbers, texts = zip(*chunk, strict=True)
            yield from zip(numbers, self._pool.map(self._encode, texts), strict=True)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.special_tokens.wrap(self._tokenizer.encode(text)), dtype=np.int64)

    def _numbered(self, mark: Mark) -> Iterator[tuple[int, str]]:
        """Yield the documents from `mark` on with their numbers, epoch after epoch, without end."""
        number, epoch, block, state = mark
        while True:
            is_whole_epoch, first = not block, number
            texts = self._stream.read(state)
            while raw := list(islice(texts, self._block_size)):
                # Taken now, since the reader may have moved on when the block is used up.
                state, order = self._stream.state(), np.arange(len(raw))
                if self._shuffled:
                    key = derive_key(self._seed, "stream", epoch, block)
                    order = permute(order, length=len(raw), key=key)
                for place in order:
                    if self._keep(raw[place]):
                        yield number, raw[place]
                        number += 1
                block += 1
                self._marks.append(Mark(number, epoch, block, state))
            if is_whole_epoch and number == first:
                raise DataError(f"dataset {self._stream.name} has no documents for this split")
            epoch, block, state = epoch + 1, 0, None
            self._marks.append(Mark(number, epoch))
