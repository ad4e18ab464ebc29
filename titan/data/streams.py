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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from titan.data.base import NUM_LANES, Layout, Samples
from titan.data.errors import DataError
from titan.data.order import derive_key, permute
from titan.data.packing import Framing
from titan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNSHUFFLED_BLOCK = 1024  # documents between two places the reader can resume at


class Stream(Protocol):
    """Resumable text; sources.TextStream is one."""

    name: str

    def read(self, state: dict[str, Any] | None = None) -> Iterator[str]: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Mark:
    """A place to resume reading: before block `block` of `epoch`, with `document` documents numbered so far."""

    epoch: int = 0
    block: int = 0
    document: int = 0
    state: dict[str, Any] | None = None


class _Numbered:
    """The documents of a stream in their final order: (number, text), without end."""

    def __init__(
        self, stream: Stream, *, keep: Callable[[str], bool], shuffle_buffer: int, seed: int
    ) -> None:
        self._stream, self._keep, self._seed = stream, keep, seed
        self._shuffled = shuffle_buffer > 0
        self._block_size = shuffle_buffer or _UNSHUFFLED_BLOCK
        self.marks: deque[_Mark] = deque()

    def read(self, mark: _Mark) -> Iterator[tuple[int, str]]:
        number, epoch, block, state = mark.document, mark.epoch, mark.block, mark.state
        self.marks = deque()
        while True:
            before = number
            texts = self._stream.read(state)
            while True:
                self.marks.append(_Mark(epoch, block, number, state))
                raw = list(islice(texts, self._block_size))
                # Taken before the block is used: what follows may run long after the reader moved on.
                state = self._stream.state() if raw else None
                for text in self._ordered(raw, epoch=epoch, block=block):
                    if self._keep(text):
                        yield number, text
                        number += 1
                if len(raw) < self._block_size:
                    break
                block += 1
            if number == before and not mark.block:
                raise DataError(f"dataset {self._stream.name} has no documents for this split")
            mark = _Mark()
            epoch, block, state = epoch + 1, 0, None

    def _ordered(self, raw: list[str], *, epoch: int, block: int) -> Iterator[str]:
        if not self._shuffled:
            return iter(raw)
        key = derive_key(self._seed, "stream", epoch, block)
        return (raw[permute(i, length=len(raw), key=key)] for i in range(len(raw)))


@dataclass
class _Lane:
    """Documents waiting to be packed, as text or, once needed, as tokens; `offset` tokens of the first are used."""

    sample: int = 0
    offset: int = 0
    first_document: int = 0
    """Documents before this one were used up before the bookmark."""
    waiting: deque[tuple[int, str]] = field(default_factory=deque)
    tokens: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    num_tokens: int = 0

    def oldest(self, otherwise: int) -> int:
        """Number of the first document this lane still needs."""
        if self.tokens:
            return self.tokens[0][0]
        return self.waiting[0][0] if self.waiting else max(otherwise, self.first_document)

    def add(self, number: int, ids: np.ndarray) -> None:
        self.tokens.append((number, ids))
        self.num_tokens += len(ids)

    def take(self, seq_len: int) -> np.ndarray:
        """The next seq_len + 1 tokens; the last of them is the first of the next sample."""
        parts, missing, begin = [], seq_len + 1, self.offset
        for _, ids in self.tokens:
            parts.append(ids[begin : begin + missing])
            missing -= len(parts[-1])
            begin = 0
            if not missing:
                break
        self._drop(seq_len)
        self.sample += 1
        return np.concatenate(parts)

    def _drop(self, count: int) -> None:
        self.offset += count
        while self.tokens and self.offset >= len(self.tokens[0][1]):
            length = len(self.tokens.popleft()[1])
            self.offset -= length
            self.num_tokens -= length


class StreamSamples(Samples):
    """Samples of a stream, to be asked for in rising order."""

    num_samples = None

    def __init__(
        self,
        stream: Stream,
        *,
        tokenizer: Tokenizer,
        framing: Framing,
        seq_len: int,
        shuffle_buffer: int,
        seed: int,
        keep: Callable[[str], bool] = lambda text: True,
        identity: int = 0,
    ) -> None:
        """`identity` names all that the samples depend on; a bookmark of another identity is not used."""
        self.framing = framing
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._numbered = _Numbered(stream, keep=keep, shuffle_buffer=shuffle_buffer, seed=seed)
        self._name, self._identity = stream.name, identity
        self.seek(0, layout=None, bookmark=None)

    def seek(self, position: int, *, layout: Layout | None, bookmark: Any) -> None:
        """Prepare to be asked for samples from `position` on (those of `layout`, or any)."""
        wanted = layout.lanes(position) if layout else set(range(NUM_LANES))
        if not isinstance(bookmark, dict) or bookmark["identity"] != self._identity:
            bookmark = {"lanes": {}, "marks": []}
        recorded = {int(lane): place for lane, place in bookmark["lanes"].items()}
        usable = all(
            lane in recorded and recorded[lane][0] * NUM_LANES + lane < position + NUM_LANES
            for lane in wanted
        )
        if position and not usable:
            logger.warning(
                "no bookmark for sample %d of %s: its text is read and tokenised again from the start",
                position,
                self._name,
            )
        if not (position and usable):
            recorded = dict.fromkeys(wanted, (0, 0, 0))
        self._lanes: dict[int, _Lane] = {}
        for lane in wanted:
            sample, document, offset = recorded[lane]
            self._lanes[lane] = _Lane(sample=sample, first_document=document, offset=offset)
        self._next = min(lane.first_document for lane in self._lanes.values())
        marks = [_Mark(*mark) for mark in bookmark["marks"]] + [_Mark()]
        mark = max(
            (m for m in marks if m.document <= self._next),
            key=lambda m: (m.document, m.epoch, m.block),
        )
        self._source = self._numbered.read(mark)

    def bookmark(self) -> dict[str, Any]:
        """Where each lane stands, and the newest place from which all of them can be read on; JSON-able."""
        lanes = {
            lane: (w.sample, w.oldest(self._next), w.offset) for lane, w in self._lanes.items()
        }
        needed = min(document for _, document, _ in lanes.values())
        marks = self._numbered.marks
        while len(marks) > 1 and marks[1].document <= needed:
            marks.popleft()
        oldest = [[m.epoch, m.block, m.document, m.state] for m in list(marks)[:1]]
        return {
            "identity": self._identity,
            "lanes": {str(lane): list(place) for lane, place in lanes.items()},
            "marks": oldest,
        }

    def get(self, indices: np.ndarray) -> np.ndarray:
        """Rows of seq_len + 1 tokens, int64[len(indices), seq_len + 1]."""
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
        while lane.num_tokens - lane.offset < self._seq_len + 1:
            while not lane.waiting:
                self._read_document()
            number, text = lane.waiting.popleft()
            lane.add(number, np.asarray(self._framed(text), dtype=np.int64))

    def _framed(self, text: str) -> list[int]:
        return self.framing.wrap(self._tokenizer.encode(text))

    def _read_document(self) -> None:
        number, text = next(self._source)
        self._next = number + 1
        owner = self._lanes.get(number % NUM_LANES)
        if owner is not None and number >= owner.first_document:
            owner.waiting.append((number, text))


def merge_bookmarks(bookmarks: list[dict[str, Any]]) -> dict[str, Any]:
    """One bookmark from those of several ranks, each of which knows only its own lanes."""
    lanes: dict[str, Any] = {}
    marks: list[Any] = []
    for bookmark in bookmarks:
        lanes |= bookmark["lanes"]
        marks += [mark for mark in bookmark["marks"] if mark not in marks]
    return bookmarks[0] | {"lanes": lanes, "marks": marks}
