"""Streams: text that is read while training, packed so that any number of ranks sees the same sequence.

Documents of a stream are numbered as they come, epoch after epoch; document d goes to lane d mod 64. Each lane packs
its own documents into samples, and sample i is the next one of lane i mod 64. So sample i is a function of
the stream alone, while a rank that wants only some lanes tokenises only their documents (it still reads all).
Shuffling is within blocks of `shuffle_buffer` documents, each permuted by a key of (seed, epoch, block).

A position is one integer; to reach it without tokenising everything again, `bookmark()` records where each lane and
the reader stand. A bookmark only saves work: where one is missing, the stream is replayed from its start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from titan.data import DataError
from titan.data.base import NUM_LANES, RankShare, Samples
from titan.data.order import derive_key, permute
from titan.data.sources import TextStream
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNSHUFFLED_BLOCK = 1024  # documents between two places the reader can resume at


class Mark(NamedTuple):
    """A place to resume reading: before block `block` of `epoch`, with `document` documents numbered so far."""

    document: int = 0
    epoch: int = 0
    block: int = 0
    state: dict[str, Any] | None = None


class NumberedDocuments:
    """The documents of a stream in their final order, without end."""

    def __init__(
        self, stream: TextStream, *, keep: Callable[[str], bool], shuffle_buffer: int, seed: int
    ) -> None:
        self._stream, self._keep, self._seed = stream, keep, seed
        self._shuffled = shuffle_buffer > 0
        self._block_size = shuffle_buffer or _UNSHUFFLED_BLOCK
        self.marks: deque[Mark] = deque()
        """Places passed since `read`, oldest first; whoever needs the oldest no more may drop it."""

    def read(self, mark: Mark) -> Iterator[tuple[int, str]]:
        """(number, text) of the documents from `mark` on."""
        self.marks = deque([mark])
        return self._read_epochs(mark)

    def _read_epochs(self, mark: Mark) -> Iterator[tuple[int, str]]:
        while True:
            end = yield from self._read_epoch(mark)
            if end == mark.document and not mark.block:
                raise DataError(f"dataset {self._stream.name} has no documents for this split")
            mark = Mark(document=end, epoch=mark.epoch + 1)
            self.marks.append(mark)

    def _read_epoch(self, mark: Mark) -> Generator[tuple[int, str], None, int]:
        """The rest of an epoch; returns the number of the next document."""
        number, epoch, block, state = mark
        texts = self._stream.read(state)
        while raw := list(islice(texts, self._block_size)):
            # Taken before the block is used: what follows may run long after the reader moved on.
            state = self._stream.state()
            order = np.arange(len(raw))
            if self._shuffled:
                key = derive_key(self._seed, "stream", epoch, block)
                order = permute(order, length=len(raw), key=key)
            for place in order:
                if self._keep(raw[place]):
                    yield number, raw[place]
                    number += 1
            block += 1
            self.marks.append(Mark(number, epoch, block, state))
        return number


@dataclass
class _Lane:
    """Documents waiting to be packed, as text and, once needed, as tokens; `offset` tokens are used up."""

    sample: int = 0
    """Number within the lane of the next sample."""
    first_document: int = 0
    """Documents before this one were used up before the bookmark."""
    offset: int = 0
    texts: deque[tuple[int, str]] = field(default_factory=deque)
    tokens: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    num_tokens: int = 0

    def place(self, next_document: int) -> list[int]:
        """Where the lane stands, when `next_document` is the next to be read: its first three fields then."""
        unread = (max(next_document, self.first_document), "")
        [oldest, _] = (self.tokens or self.texts or [unread])[0]
        return [self.sample, oldest, self.offset]

    def take(self, seq_len: int) -> np.ndarray:
        """The next seq_len + 1 tokens; the last of them is the first of the next sample."""
        parts, missing, begin = [], seq_len + 1, self.offset
        for _, ids in self.tokens:
            parts.append(ids[begin : begin + missing])
            missing -= len(parts[-1])
            begin = 0
            if not missing:
                break
        self.sample += 1
        self.offset += seq_len
        while self.tokens and self.offset >= len(self.tokens[0][1]):
            length = len(self.tokens.popleft()[1])
            self.offset -= length
            self.num_tokens -= length
        return np.concatenate(parts)


class StreamSamples(Samples):
    """Samples of a stream, to be asked for in rising order."""

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
        """`identity` names all that the samples depend on; a bookmark of another identity is not used."""
        self.special_tokens = special_tokens
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._numbered = NumberedDocuments(
            stream, keep=keep, shuffle_buffer=shuffle_buffer, seed=seed
        )
        self._name, self._identity = stream.name, identity
        self.seek(0, share=None, bookmark=None)

    def seek(self, position: int, *, share: RankShare | None, bookmark: Any) -> None:
        wanted = share.lanes(position) if share else set(range(NUM_LANES))
        if (bookmark or {}).get("identity") != self._identity:
            bookmark = {"lanes": {}, "marks": []}
        places = {int(lane): place for lane, place in bookmark["lanes"].items()}
        # A lane that is past the position is of no use: a blend with other weights now comes back to it.
        behind = {
            lane for lane in places if places[lane][0] * NUM_LANES + lane - NUM_LANES < position
        }
        if not wanted <= behind:
            places = {lane: [0, 0, 0] for lane in wanted}
            if position:
                logger.warning(
                    "no bookmark for sample %d of %s: its text is read and tokenised again from the start",
                    position,
                    self._name,
                )
        self._lanes: dict[int, _Lane] = {}
        for lane in wanted:
            sample, document, offset = places[lane]
            self._lanes[lane] = _Lane(sample, document, offset)
        needed = min(lane.first_document for lane in self._lanes.values())
        marks = [Mark(), *(Mark(*mark) for mark in bookmark["marks"])]
        mark = max((m for m in marks if m.document <= needed), key=lambda m: m[:3])
        self._next_document = mark.document
        self._source = self._numbered.read(mark)

    def bookmark(self) -> dict[str, Any]:
        """Where each lane stands, and the newest place from which all of them can be read on; JSON-able."""
        places = {lane: w.place(self._next_document) for lane, w in self._lanes.items()}
        needed = min(document for _, document, _ in places.values())
        marks = self._numbered.marks
        while len(marks) > 1 and marks[1].document <= needed:
            marks.popleft()
        return {
            "identity": self._identity,
            "lanes": {str(lane): place for lane, place in places.items()},
            "marks": [list(marks[0])],
        }

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._sample(int(index)) for index in indices])

    def _sample(self, index: int) -> np.ndarray:
        number, lane_number = divmod(index, NUM_LANES)
        lane = self._lanes[lane_number]
        assert lane.sample <= number, f"sample {index} was passed already; seek first"
        while True:
            self._fill(lane)
            row = lane.take(self._seq_len)
            if lane.sample > number:
                return row

    def _fill(self, lane: _Lane) -> None:
        """Give the lane the tokens of a sample, reading documents for the other lanes along the way."""
        while lane.num_tokens - lane.offset <= self._seq_len:
            while not lane.texts:
                self._read_document()
            number, text = lane.texts.popleft()
            ids = self.special_tokens.wrap(self._tokenizer.encode(text))
            lane.tokens.append((number, np.array(ids, dtype=np.int64)))
            lane.num_tokens += len(ids)

    def _read_document(self) -> None:
        number, text = next(self._source)
        self._next_document = number + 1
        lane = self._lanes.get(number % NUM_LANES)
        if lane is not None and number >= lane.first_document:
            lane.texts.append((number, text))


def merge_bookmarks(bookmarks: list[dict[str, Any]]) -> dict[str, Any]:
    """One bookmark from those of several ranks, each of which knows only its own lanes."""
    lanes: dict[str, Any] = {}
    marks: list[Any] = []
    for bookmark in bookmarks:
        lanes |= bookmark["lanes"]
        marks += [mark for mark in bookmark["marks"] if mark not in marks]
    return bookmarks[0] | {"lanes": lanes, "marks": marks}
