"""Streams: lanes, who tokenises what, and bookmarks that save work and change nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from titan.data import DataError
from titan.data.base import NUM_LANES, RankShare
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import Mark, StreamSamples, merge_bookmarks
from titan.data.tokenizer import Tokenizer, bytes_tokenizer

SEQ_LEN = 16


class ListStream:
    """A stream of a list that counts what is read; its state is the place in the list."""

    name = "list"

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.place, self.reads = texts, 0, 0

    def read(self, state: dict[str, Any] | None = None) -> Iterator[str]:
        self.place = state["place"] if state else 0
        while self.place < len(self.texts):
            self.place += 1
            self.reads += 1
            yield self.texts[self.place - 1]

    def state(self) -> dict[str, Any]:
        return {"place": self.place}


class Counting:
    """The bytes tokenizer, counting the texts it is given."""

    def __init__(self) -> None:
        self._inner, self.texts = bytes_tokenizer(), 0

    def encode(self, text: str) -> Sequence[int]:
        self.texts += 1
        return self._inner.encode(text)


def samples(
    texts: list[str], *, shuffle_buffer: int = 0, **options: Any
) -> tuple[StreamSamples, ListStream, Counting]:
    stream, tokenizer = ListStream(texts), Counting()
    made = StreamSamples(
        stream,  # pyright: ignore[reportArgumentType]
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        special_tokens=SpecialTokens(256, 257),
        seq_len=SEQ_LEN,
        shuffle_buffer=shuffle_buffer,
        seed=3,
        **options,
    )
    return made, stream, tokenizer


def test_lanes_pack_their_own_documents_in_order(texts: list[str]) -> None:
    made, *_ = samples(texts)
    rows = made.get(np.arange(3 * NUM_LANES))
    tokenizer: Tokenizer = bytes_tokenizer()
    for lane in (0, 5, 63):
        joined = [t for text in texts[lane::NUM_LANES] for t in (256, *tokenizer.encode(text), 257)]
        for number in range(3):
            begin = number * SEQ_LEN
            assert rows[number * NUM_LANES + lane].tolist() == joined[begin : begin + SEQ_LEN + 1]


def test_a_short_stream_starts_over_in_another_order() -> None:
    texts = [f"{number:03d} is a document" for number in range(100)]
    made, stream, _ = samples(texts, shuffle_buffer=30)
    list(made.get(np.arange(40 * NUM_LANES)))
    assert stream.reads > 2 * len(texts)
    [first, second] = [[], []]
    source = made._numbered.read(Mark())
    for part in (first, second):
        part += [next(source)[1] for _ in range(100)]
    assert sorted(first) == sorted(second) == texts
    assert first != second != texts
    # Blocks of 30 are shuffled within themselves.
    assert sorted(first[:30]) == texts[:30] and first[:30] != texts[:30]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (RankShare(rank=0, world=1, batch=1), 64),
        (RankShare(rank=1, world=2, batch=1), 32),
        (RankShare(rank=3, world=4, batch=4), 16),
        (RankShare(rank=5, world=64, batch=1), 1),
        (RankShare(rank=7, world=64, batch=8), 8),
        (RankShare(rank=0, world=3, batch=1), 64),
        (RankShare(rank=2, world=3, batch=2), 64),
    ],
)
def test_lanes_of_a_layout_are_those_of_its_samples(share: RankShare, expected: int) -> None:
    for position in (0, 7, 1000):
        taken = {
            (position + step * share.stride + share.rank * share.batch + row) % NUM_LANES
            for step in range(NUM_LANES)
            for row in range(share.batch)
        }
        assert share.lanes(position) == taken
        assert len(taken) == expected


def test_a_rank_tokenises_only_its_lanes(texts: list[str]) -> None:
    share = RankShare(rank=1, world=4, batch=4)
    mine = (
        np.arange(64)[:, None] * share.stride + share.rank * share.batch + np.arange(4)
    ).reshape(-1)
    whole, _, all_texts = samples(texts)
    expected = whole.get(np.arange(mine[-1] + 1))[mine]
    made, _, own_texts = samples(texts)
    made.seek(0, share=share, bookmark=None)
    np.testing.assert_array_equal(made.get(mine), expected)
    assert own_texts.texts <= all_texts.texts / 4 + NUM_LANES


@pytest.mark.parametrize("shuffle_buffer", [0, 50])
@pytest.mark.parametrize("position", [1, 64, 777, 12_000])
def test_a_bookmark_saves_work_and_changes_nothing(
    texts: list[str], shuffle_buffer: int, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = texts * 10
    made, *_ = samples(texts, shuffle_buffer=shuffle_buffer)
    made.get(np.arange(position))
    bookmark = json.loads(json.dumps(made.bookmark()))
    expected = made.get(np.arange(position, position + 100))
    quick, stream, tokenizer = samples(texts, shuffle_buffer=shuffle_buffer)
    with caplog.at_level(logging.WARNING):
        quick.seek(position, share=None, bookmark=bookmark)
        np.testing.assert_array_equal(quick.get(np.arange(position, position + 100)), expected)
        assert not caplog.records
        slow, slow_stream, slow_tokenizer = samples(texts, shuffle_buffer=shuffle_buffer)
        slow.seek(position, share=None, bookmark=None)
        np.testing.assert_array_equal(slow.get(np.arange(position, position + 100)), expected)
        assert "tokenised again from the start" in caplog.text
    if position == 12_000:
        assert tokenizer.texts < slow_tokenizer.texts / 4
        assert stream.reads < slow_stream.reads


def test_a_bookmark_of_another_stream_is_not_used(
    texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    other, *_ = samples(texts, identity=1)
    other.get(np.arange(500))
    made, *_ = samples(texts[::-1], identity=2)
    expected = made.get(np.arange(600))[500:]
    with caplog.at_level(logging.WARNING):
        made.seek(500, share=None, bookmark=other.bookmark())
        np.testing.assert_array_equal(made.get(np.arange(500, 600)), expected)
    assert "no bookmark" in caplog.text


def test_bookmarks_of_ranks_merge_and_serve_another_layout(texts: list[str]) -> None:
    shares = [RankShare(rank=rank, world=4, batch=2) for rank in range(4)]
    bookmarks = []
    for share in shares:
        made, *_ = samples(texts, shuffle_buffer=20)
        made.seek(0, share=share, bookmark=None)
        first = share.rank * share.batch
        for step in range(100):
            made.get(np.arange(step * 8 + first, step * 8 + first + 2))
        bookmarks.append(made.bookmark())
    assert all(len(bookmark["lanes"]) == 16 for bookmark in bookmarks)
    merged = merge_bookmarks(bookmarks)
    assert len(merged["lanes"]) == 64
    whole, *_ = samples(texts, shuffle_buffer=20)
    expected = whole.get(np.arange(800, 900))
    resumed, _, tokenizer = samples(texts, shuffle_buffer=20)
    resumed.seek(800, share=RankShare(rank=0, world=1, batch=4), bookmark=merged)
    np.testing.assert_array_equal(resumed.get(np.arange(800, 900)), expected)
    assert tokenizer.texts < 400


def test_a_stream_without_documents_is_an_error() -> None:
    made, *_ = samples(["one", "two"], keep=lambda text: False)
    with pytest.raises(DataError, match="list has no documents for this split"):
        made.get(np.arange(1))
