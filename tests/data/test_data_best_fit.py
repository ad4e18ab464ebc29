"""Rows of whole documents: every token is predicted once, marks and padding are right, and every layout sees the same rows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import make_texts, write_jsonl
from tests.data.test_data_loader import LAYOUTS, SEQ_LEN, TOKENIZER, Job, step_rows, training
from tests.support.loaders import build_validation_loader
from titan.config import schema as s
from titan.data import DataError
from titan.data import cache as cache_module
from titan.data.best_fit import best_fit, plan_rows
from titan.data.packing import pack
from titan.data.special_tokens import SpecialTokens
from titan.data.text import num_bytes
from titan.losses.loss import IGNORED

MARKS = {
    "both": SpecialTokens(256, 257),
    "begin": SpecialTokens(256, None),
    "end": SpecialTokens(None, 257),
}


def documents_of(
    marks: SpecialTokens, *, count: int = 300, longest: int = 90
) -> list[list[int]]:
    generator = random.Random(1)
    return [
        marks.wrap(
            [
                number % 250,
                *(generator.randrange(256) for _ in range(generator.randrange(1, longest))),
            ]
        )
        for number in range(count)
    ]


def rows_of(tokens: np.ndarray, plan: np.ndarray) -> list[list[list[int]]]:
    """The pieces of each row."""
    rows: list[list[list[int]]] = [[] for _ in range(int(plan[0, -1]) + 1)]
    for row, start, length in plan.T.tolist():
        rows[row].append(tokens[start : start + length].tolist())
    return rows


def test_a_piece_goes_where_it_leaves_the_least_room() -> None:
    lengths, opens = [9, 7, 6, 4, 3, 2, 1], [False] * 7
    # 9 | 7 | 6 | then 4 to the 6, 3 to the 7, 2 to a new row, 1 to the 9.
    assert best_fit(lengths, opens, capacity=10) == [0, 1, 2, 2, 1, 3, 0]
    assert best_fit([4, 4, 4], [True, True, False], capacity=10) == [0, 1, 1]


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_every_token_is_predicted_once_and_only_long_documents_are_cut(
    marks: SpecialTokens,
) -> None:
    documents = documents_of(marks)
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    rows = rows_of(tokens, plan_rows(tokens, marks, seq_len=SEQ_LEN))
    assert all(sum(map(len, row)) <= SEQ_LEN + 1 for row in rows)
    whole = Counter(tuple(piece) for row in rows for piece in row)
    pairs, expected = Counter(), Counter()
    for document in documents:
        if len(document) <= SEQ_LEN + 1:
            assert whole[tuple(document)] > 0, "a document that fits was cut"
        expected.update(pairwise(document))
    for row in rows:
        for piece in row:
            pairs.update(pairwise(piece))
    assert pairs == expected
    # Not far from the rows of text that is cut anywhere, though there are few short pieces to fill up with.
    assert len(rows) <= 1.15 * sum(len(piece) for row in rows for piece in row) / (SEQ_LEN + 1)


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_positions_and_document_numbers_begin_with_each_piece(marks: SpecialTokens) -> None:
    documents = documents_of(marks)
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    for row in rows_of(tokens, plan_rows(tokens, marks, seq_len=SEQ_LEN)):
        flat = [token for piece in row for token in piece]
        padded = np.array([[*flat, *[IGNORED] * (SEQ_LEN + 1 - len(flat))]])
        batch = pack(padded, special_tokens=marks, reset_positions=True, document_mask=True)
        assert batch.positions_BS is not None and batch.document_ids_BS is not None
        at = 0
        for number, piece in enumerate(row):
            inputs = min(len(piece), SEQ_LEN - at)
            assert batch.positions_BS[0, at : at + inputs].tolist() == list(range(inputs))
            assert batch.document_ids_BS[0, at : at + inputs].tolist() == [number] * inputs
            labels = batch.labels_BS[0, at : at + len(piece)].tolist()
            # The last token of a piece predicts nothing.
            assert labels[: len(piece) - 1] == piece[1:] and labels[len(piece) - 1 :] in (
                [],
                [IGNORED],
            )
            at += len(piece)
        assert (batch.labels_BS[0, at:] == IGNORED).all() and (batch.tokens_BS >= 0).all()
        # Padding sees no document.
        assert not set(batch.document_ids_BS[0, at:].tolist()) & set(range(len(row)))


def test_a_document_that_goes_on_in_the_next_shard_is_joined_to_nothing() -> None:
    marks = MARKS["both"]
    tokens = np.array([5, 6, 257, 256, 1, 257, 256, 2, 257, 256, 7, 8], dtype=np.uint16)
    rows = rows_of(tokens, plan_rows(tokens, marks, seq_len=9))
    assert sorted(map(len, rows)) == [1, 3] and [[256, 7, 8]] in rows
    # Where only a begin token marks documents, a rest begins its row.
    tokens = np.array([5, 6, 256, 1, 256, 2, 3, 4], dtype=np.uint16)
    [first, *_] = rows_of(tokens, plan_rows(tokens, MARKS["begin"], seq_len=9))
    assert first[0] == [5, 6]


def job(corpus: Path, folder: str, **options: Any) -> Job:
    return Job(s.JsonlSource(path=str(corpus)), cache=folder, packing="best_fit", **options)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Short documents, which share rows of 33 bytes, and longer ones."""
    return write_jsonl(
        tmp_path / "mixed.jsonl", [text[: 5 + n % 47] for n, text in enumerate(make_texts(900))]
    )


def test_every_layout_sees_the_same_rows_and_a_resumed_one_goes_on(
    mixed: Path, cache: str
) -> None:
    made = job(mixed, cache)
    whole = made.loaders(LAYOUTS[0])
    length = whole[0].samples.num_samples
    assert length is not None and 24 * 20 < length < 24 * 80
    expected = [step_rows(whole) for _ in range(length // 24 + 3)]
    for share in LAYOUTS[1::2]:
        loaders = made.loaders(share)
        for step in expected[:3]:
            np.testing.assert_array_equal(step_rows(loaders), step)
    # Into the second epoch.
    for position in (5, length // 24 - 1):
        loaders = made.loaders((3, 4, 2))
        for loader in loaders:
            loader.load_state_dict({"position": 24 * position})
        for step in expected[position : position + 3]:
            np.testing.assert_array_equal(step_rows(loaders), step)
    first, second = (
        whole[0].samples.get(np.arange(length)),
        whole[0].samples.get(np.arange(length, 2 * length)),
    )
    assert sorted(map(bytes, first)) == sorted(map(bytes, second)) and (first != second).any()
    assert len(list(Path(cache).glob("tokens/packing/*.npy"))) == 1


def test_rows_of_many_shards_are_the_same_on_any_number_of_ranks(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_TOKENS", 4000)
    many = job(mixed, str(tmp_path / "a")).loaders((2, 12, 1))
    steps = [step_rows(many) for _ in range(50)]
    assert len(list((tmp_path / "a").glob("tokens/packing/*.npy"))) > 3
    one = job(mixed, str(tmp_path / "a")).loaders((1, 24, 1))
    for expected in steps:
        np.testing.assert_array_equal(step_rows(one), expected)


def test_labels_of_padding_are_ignored_and_count_no_bytes(mixed: Path, cache: str) -> None:
    loader = job(mixed, cache).loader((1, 400, 1), 0)
    [batch] = loader.next_step()
    padding = (batch.labels_BS == IGNORED).float().mean()
    assert 0 < padding < 0.05 and (batch.tokens_BS >= 0).all()
    assert num_bytes(batch, TOKENIZER) == int(
        ((batch.labels_BS >= 0) & (batch.labels_BS < 256)).sum()
    )


def test_validation_rows_are_packed_too(mixed: Path, cache: str) -> None:
    data = job(mixed, cache, validation_fraction=0.2).data
    section = s.ValidationSection(local_batch_size=4)
    loader = build_validation_loader(
        section, training=training(), data=data, tokenizer=TOKENIZER, rank=0, world=1
    )
    batches = list(loader.validation_batches(-1))
    # Every token but the first of each held-out document, some of which were cut.
    labels = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
    assert labels > 1000 and any((batch.labels_BS == IGNORED).any() for batch in batches)


def test_text_without_marks_and_streams_are_refused(mixed: Path, hub: Path, cache: str) -> None:
    with pytest.raises(DataError, match=r"data\.packing = 'best_fit' need documents"):
        job(mixed, cache, add_bos=False, add_eos=False).loader((1, 1, 1), 0)
    pytest.importorskip("datasets")
    stream = Job(s.HuggingFaceSource(path=str(hub)), cache=cache, packing="best_fit")
    with pytest.raises(DataError, match="is a stream; set streaming = false"):
        stream.loader((1, 1, 1), 0)
