"""Streams: packing, shuffling, and bookmarks that save work and change nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from titan.data import DataError
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import Mark, StreamSamples
from titan.data.tokenizer import bytes_tokenizer

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


def test_documents_are_packed_one_after_another(texts: list[str]) -> None:
    made, *_ = samples(texts)
    joined = [t for text in texts for t in (256, *bytes_tokenizer().encode(text), 257)]
    for number, row in enumerate(made.get(np.arange(100))):
        begin = number * SEQ_LEN
        assert row.tolist() == joined[begin : begin + SEQ_LEN + 1]


def test_a_short_stream_starts_over_in_another_order() -> None:
    texts = [f"{number:03d} is a document" for number in range(100)]
    made, stream, _ = samples(texts, shuffle_buffer=30)
    made.get(np.arange(300))
    assert stream.reads > 2 * len(texts)
    source = made._numbered(Mark())
    first, second = ([next(source)[1] for _ in range(100)] for _ in range(2))
    assert sorted(first) == sorted(second) == texts
    assert first != second != texts
    # Blocks of 30 are shuffled within themselves.
    assert sorted(first[:30]) == texts[:30] and first[:30] != texts[:30]


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
        quick.seek(position, bookmark=bookmark)
        np.testing.assert_array_equal(quick.get(np.arange(position, position + 100)), expected)
        assert not caplog.records
        slow, slow_stream, slow_tokenizer = samples(texts, shuffle_buffer=shuffle_buffer)
        slow.seek(position)
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
        made.seek(500, bookmark=other.bookmark())
        np.testing.assert_array_equal(made.get(np.arange(500, 600)), expected)
    assert "no bookmark" in caplog.text


def test_a_bookmark_of_one_rank_serves_any_place_after_it(texts: list[str]) -> None:
    whole, *_ = samples(texts, shuffle_buffer=20)
    expected = whole.get(np.arange(820, 900))
    behind, *_ = samples(texts, shuffle_buffer=20)
    behind.get(np.arange(790, 800))  # another rank took the samples up to 820
    resumed, _, tokenizer = samples(texts, shuffle_buffer=20)
    resumed.seek(820, bookmark=behind.bookmark())
    np.testing.assert_array_equal(resumed.get(np.arange(820, 900)), expected)
    assert tokenizer.texts < 200


def test_a_stream_without_documents_is_an_error() -> None:
    made, *_ = samples(["one", "two"], keep=lambda text: False)
    with pytest.raises(DataError, match="list has no documents for this split"):
        made.get(np.arange(1))
