"""Streams: packing, shuffling, a part for each rank, and bookmarks from which a resumed rank goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data_loader import Job
from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as training_job
from tests.support.ranks import Pool
from tests.support.runs import logged_rows
from tests.support.trainers import PoolTrainer, run_to_end
from titan.config import schema
from titan.data import DataError
from titan.data.loader import Loader
from titan.data.sources import TextStream
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import Bookmark, StreamSamples
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
    stream: Any = ListStream(texts)
    tokenizer: Any = Counting()
    made = StreamSamples(
        stream,
        tokenizer=tokenizer,
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
    source = made.numbered(Bookmark())
    first, second = ([next(source)[1] for _ in range(100)] for _ in range(2))
    assert sorted(first) == sorted(second) == texts
    assert first != second != texts
    # Blocks of 30 are shuffled within themselves.
    assert sorted(first[:30]) == texts[:30] and first[:30] != texts[:30]


@pytest.mark.parametrize("shuffle_buffer", [0, 50])
@pytest.mark.parametrize("position", [1, 64, 777, 12_000])
def test_a_rank_goes_on_from_its_bookmark(
    texts: list[str], shuffle_buffer: int, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = texts * 10
    made, _, whole = samples(texts, shuffle_buffer=shuffle_buffer)
    made.get(np.arange(position))
    bookmark = json.loads(json.dumps(made.bookmark()))
    read = whole.texts
    expected = made.get(np.arange(100))
    resumed, _, tokenizer = samples(texts, shuffle_buffer=shuffle_buffer)
    with caplog.at_level(logging.WARNING):
        resumed.seek(position, bookmark=bookmark)
        np.testing.assert_array_equal(resumed.get(np.arange(100)), expected)
        assert not caplog.records
    if position == 12_000:
        assert tokenizer.texts < read / 4


def test_a_bookmark_of_another_stream_is_not_used(
    texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    other, *_ = samples(texts, identity=1)
    other.get(np.arange(500))
    made, *_ = samples(texts[::-1], identity=2)
    expected = made.get(np.arange(100))
    with caplog.at_level(logging.WARNING):
        made.seek(500, bookmark=other.bookmark())
        np.testing.assert_array_equal(made.get(np.arange(100)), expected)
    assert "no bookmark for list: it is read from its start" in caplog.text


def test_a_stream_without_documents_is_an_error() -> None:
    made, *_ = samples(["one", "two"], keep=lambda text: False)
    with pytest.raises(DataError, match="list has no documents for this split"):
        made.get(np.arange(1))


# ---- a part for each rank ------------------------------------------------------------------------


def stream_job(hub: Path, cache: str, *more: schema.Section, **options: Any) -> Job:
    pytest.importorskip("datasets")
    source = schema.HuggingFaceSource(path=str(hub), shuffle_buffer=50)
    return Job(source, *more, cache=cache, **options)


def rows_of(loader: Loader, steps: int) -> np.ndarray:
    batches = [batch for _ in range(steps) for batch in loader.next_step()]
    return np.concatenate([batch.tokens_BS.numpy() for batch in batches])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_read_parts_that_make_the_whole(
    world: int, hub: Path, cache: str, texts: list[str]
) -> None:
    """Three files are a part each for three ranks. Two ranks take every second document."""
    parts = []
    for rank in range(world):
        section = stream_job(hub, cache).data.sources[0]
        assert isinstance(section, schema.HuggingFaceSource)
        parts.append([*TextStream(section, rank=rank, world=world).read()])
    assert sorted(text for part in parts for text in part) == sorted(texts)
    if world == 3:
        assert sorted(map(len, parts)) == [10, 150, 240]


def test_keys_of_rows_that_nothing_reads_are_counted(hub: Path, cache: str) -> None:
    for file in hub.iterdir():
        file.write_text(file.read_text().replace('{"text"', '{"url": "x", "text"'))
    first, second = stream_job(hub, cache).loaders((2, 1, 1))
    [line] = first.samples.unread
    assert line.endswith(": not read: url in 100 of 100 rows") and not second.samples.unread


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_tokenizes_its_part_only(
    world: int, hub: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = StreamSamples.encode

    def watched(self: StreamSamples, text: str) -> np.ndarray:
        seen.append(text)
        return encode(self, text)

    monkeypatch.setattr(StreamSamples, "encode", watched)
    by_rank = []
    for loader in stream_job(hub, cache, shuffle=False).loaders((world, 4, 1)):
        seen.clear()
        rows_of(loader, 3)
        by_rank.append({*seen})
    assert all(by_rank) and not set.intersection(*by_rank)


@pytest.mark.parametrize("blend", [False, True])
def test_a_resume_on_as_many_ranks_goes_on_exactly(
    blend: bool, hub: Path, cache: str, corpus: Path
) -> None:
    more = [schema.JsonlSource(path=str(corpus))] if blend else []
    job = stream_job(hub, cache, *more)
    first = job.loaders((2, 6, 2), workers=1)
    for loader in first:
        rows_of(loader, 31)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    saved = {"position": 31 * 24, "bookmarks": [state["bookmark"] for state in states]}
    expected = [rows_of(loader, 4) for loader in first]
    second = job.loaders((2, 6, 2))
    for loader, rows in zip(second, expected, strict=True):
        loader.load_state_dict(saved)
        np.testing.assert_array_equal(rows_of(loader, 4), rows)
    for loader in (*first, *second):
        loader.close()


def test_another_number_of_ranks_is_refused(hub: Path, cache: str, corpus: Path) -> None:
    saved = {"position": 48, "bookmarks": [{}, {}]}
    with pytest.raises(
        DataError, match=r"among 2 data-parallel ranks, and this run has 3: resume on 2"
    ):
        stream_job(hub, cache).loader((3, 8, 1), 0).load_state_dict(saved)
    # A job that reads no stream any more needs the position only.
    loader = Job(schema.JsonlSource(path=str(corpus)), cache=cache).loader((3, 8, 1), 0)
    loader.load_state_dict(saved)
    assert loader.state_dict().keys() == {"position", "order"}


def test_skipped_samples_of_a_stream_are_dropped(hub: Path, cache: str) -> None:
    job = stream_job(hub, cache)
    whole, loader = job.loader((2, 12, 1), 1), job.loader((2, 12, 1), 1)
    expected = rows_of(whole, 6)
    np.testing.assert_array_equal(rows_of(loader, 2), expected[:24])
    loader.skip(48, 96)
    np.testing.assert_array_equal(rows_of(loader, 2), expected[48:])
    assert loader.state_dict()["position"] == 144


def run_to(folder: Path, hub: Path, steps: int) -> list[float]:
    """Train on this rank of the pool up to a step. Return the losses of all steps so far."""
    base: dict[str, Any] = {
        "data": {"sources": [{"type": "huggingface", "path": str(hub), "shuffle_buffer": 50}]},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 6},
        "checkpoint": {"enable": True, "interval": 3, "last_save_model_only": False},
    }
    trainer = PoolTrainer(training_job(folder, base=with_changes(SMALL, **base)))
    run_to_end(trainer)
    return [row["loss"] for row in logged_rows(folder)]


def test_a_run_of_two_ranks_resumes_exactly(pool: Pool, tmp_path: Path, hub: Path) -> None:
    pytest.importorskip("datasets")
    whole = pool.run(2, run_to, tmp_path / "whole", hub, 6)[0]
    assert pool.run(2, run_to, tmp_path / "cut", hub, 3)[0] == whole[:3]
    assert len(whole) == 6 and pool.run(2, run_to, tmp_path / "cut", hub, 6)[0] == whole
    with pytest.raises(AssertionError, match="among 2 data-parallel ranks, and this run has 1"):
        pool.run(1, run_to, tmp_path / "cut", hub, 9)
