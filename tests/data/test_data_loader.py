"""The loader: one global order for every share, resume at any step, blends, prefetch, validation."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.loaders import build_loader, build_validation_loader
from tests.support.tables import table, tabled
from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Samples, ShardSpec
from titan.data.loader import Loader
from titan.data.special_tokens import SpecialTokens
from titan.data.text import collate_rows, num_bytes
from titan.data.tokenizer import bytes_tokenizer
from titan.losses.loss import IGNORED

SEQ_LEN = 32
TOKENIZER = bytes_tokenizer()
# (ranks, rows a rank, accumulation): 24 samples a step each.
LAYOUTS = table(__file__, "layouts")


def training(**changes: Any) -> s.TrainingSection:
    loader = s.DataloaderSection(num_workers=changes.pop("workers", 0))
    return s.TrainingSection(
        # pyrefly: ignore[bad-argument-type]
        **({"seq_len": SEQ_LEN, "local_batch_size": 4, "dataloader": loader} | changes)
    )


class Job:
    """A data section, and the global order that a share makes of it."""

    def __init__(self, *sources: Any, cache: str, **options: Any) -> None:
        self.data = s.DataSection(sources=list(sources), cache_folder=cache, **options)

    def loader(self, share: tuple[int, int, int], rank: int, **changes: Any) -> Loader:
        (world, batch, accumulation), seed = share, changes.pop("seed", 5)
        return build_loader(
            training(local_batch_size=batch, **changes),
            data=self.data,
            tokenizer=TOKENIZER,
            rank=rank,
            world=world,
            seed=seed,
            accumulation=accumulation,
        )

    def loaders(self, share: tuple[int, int, int], **changes: Any) -> list[Loader]:
        return [self.loader(share, rank, **changes) for rank in range(share[0])]


def text_job(corpus: Path, cache: str, **options: Any) -> Job:
    return Job(s.JsonlSource(path=str(corpus)), cache=cache, **options)


def step_rows(loaders: list[Loader]) -> np.ndarray:
    """Inputs of one step of all ranks, in the order of their global sample numbers; checks the numbers."""
    rows: dict[int, np.ndarray] = {}
    for loader in loaders:
        for batch in loader.next_step():
            for offset, row in enumerate(batch.tokens_BS.numpy()):
                assert batch.first_sample + offset not in rows
                rows[batch.first_sample + offset] = row
    order = sorted(rows)
    assert order == list(range(order[0], order[0] + len(order)))
    return np.stack([rows[number] for number in order])


@pytest.fixture(params=["map", "blend"])
def job(request: pytest.FixtureRequest, corpus: Path, cache: str) -> Job:
    """Finite text, alone and in a blend. tests/data/test_data_streams.py has streams."""
    local = s.JsonlSource(path=str(corpus))
    if request.param == "map":
        return Job(local, cache=cache)
    return Job(local, s.SyntheticSource(weight=0.25), cache=cache)


def test_every_layout_sees_the_same_global_order(job: Job) -> None:
    reference = job.loaders(LAYOUTS[0])
    expected = [step_rows(reference) for _ in range(3)]
    assert len({row.tobytes() for step in expected for row in step}) == 3 * 24
    for share in LAYOUTS[1:]:
        loaders = job.loaders(share)
        for step in expected:
            np.testing.assert_array_equal(step_rows(loaders), step)


def test_resume_on_other_ranks_goes_on_exactly(job: Job) -> None:
    uninterrupted = job.loaders((1, 24, 1))
    expected = [step_rows(uninterrupted) for _ in range(40)]
    for before, after, steps in [
        ((2, 12, 1), (3, 4, 2), 2),
        ((4, 6, 1), (1, 24, 1), 29),
        ((1, 12, 2), (4, 3, 2), 35),
    ]:
        first = job.loaders(before)
        for step in expected[:steps]:
            np.testing.assert_array_equal(step_rows(first), step)
        state = first[0].state_dict()
        assert state["position"] == steps * 24
        second = job.loaders(after)
        for loader in second:
            loader.load_state_dict(state)
        for step in expected[steps : steps + 4]:
            np.testing.assert_array_equal(step_rows(second), step)


OTHERS: dict[str, Any] = {
    "shuffle": False,
    "packing": "best_fit",
    "add_bos": False,
    "add_eos": False,
    "reset_positions": True,
    "document_mask": True,
    "seed": 6,
    "validation_fraction": 0.3,
    "skip": ["corpus:1"],
    "cache_folder": "other",
    "sources": "body",
    "seq_len": 16,
}
assert OTHERS.keys() == {*s.DataSection.model_fields, "seed", "seq_len"}


@pytest.mark.parametrize("key", OTHERS)
def test_a_resume_refuses_what_changes_the_samples_and_nothing_else(
    key: str, tmp_path: Path, corpus: Path
) -> None:
    corpus.write_text(corpus.read_text().replace('{"text"', '{"body": "A text.", "text"'))

    def opened(**other: Any) -> tuple[Loader, list[Any]]:
        source = s.JsonlSource(path=str(corpus), text_key=other.pop("sources", "text"))
        changes = {name: other.pop(name) for name in ("seed", "seq_len") if name in other}
        job = Job(source, cache=str(tmp_path / other.pop("cache_folder", "cache")), **other)
        loader = job.loader((1, 100, 1), 0, **changes)  # 30 steps are two epochs
        return loader, [b.tokens_BS.tolist() for _ in range(30) for b in loader.next_step()]

    (saved, expected), (loader, rows) = opened(), opened(**{key: OTHERS[key]})
    is_same = key in ("reset_positions", "document_mask", "skip", "cache_folder")
    assert (rows == expected) == (is_same and key != "skip") and (
        saved.samples.num_samples or 3000
    ) < 3000
    refusal = pytest.raises(DataError, match=f"other samples with .*({key}|text_key): .* -> ")
    with nullcontext() if is_same else refusal:
        loader.load_state_dict(json.loads(json.dumps(saved.state_dict())))


@pytest.mark.parametrize(("first", "end"), [(48, 96), (60, 61), (30, 31)])
def test_skipped_samples_are_never_seen(job: Job, first: int, end: int) -> None:
    """Steps 0 and 1 are trained on, then a range of samples is left out, which may begin anywhere; then on with other ranks."""
    whole = job.loaders((1, 24, 1))
    expected = {24 * step: step_rows(whole) for step in range(12)}
    loaders = job.loaders((2, 12, 1))
    for start in (0, 24):
        np.testing.assert_array_equal(step_rows(loaders), expected[start])
    for loader in loaders:
        loader.skip(first, end)
    rows = np.concatenate(list(expected.values()))
    begin = end if first >= 48 else 48  # what lies behind is no more than remembered
    for number in range(2):
        start = begin + 24 * number
        np.testing.assert_array_equal(step_rows(loaders), rows[start : start + 24])
    state = loaders[0].state_dict()
    assert (state["position"], state["skipped"]) == (begin + 48, [[first, end]])
    others = job.loaders((3, 4, 2))
    for loader in others:
        loader.load_state_dict(state)
    np.testing.assert_array_equal(step_rows(others), rows[begin + 48 : begin + 72])


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order(
    corpus: Path, cache: str
) -> None:
    shuffled = text_job(corpus, cache)
    length = shuffled.loader((1, 1, 1), 0).samples.num_samples
    assert length is not None and length > 100
    [epoch_0], [epoch_1] = ([step_rows([loader])] for loader in _two_epochs(shuffled, length))
    as_they_lie = step_rows([text_job(corpus, cache, shuffle=False).loader((1, length, 1), 0)])
    assert (
        sorted(map(bytes, epoch_0))
        == sorted(map(bytes, as_they_lie))
        == sorted(map(bytes, epoch_1))
    )
    assert (epoch_0 != as_they_lie).any() and (epoch_0 != epoch_1).any()
    tokens = np.concatenate(
        [TOKENIZER.encode(text) and [256, *text.encode(), 257] for text in _texts(corpus)]
    )
    np.testing.assert_array_equal(as_they_lie.reshape(-1), tokens[: length * SEQ_LEN])


def _two_epochs(job: Job, length: int) -> Iterator[Loader]:
    for epoch in range(2):
        loader = job.loader((1, length, 1), 0)
        loader.load_state_dict({"position": epoch * length})
        yield loader


def _texts(corpus: Path) -> list[str]:
    from titan.data.sources import open_documents

    return [str(text) for text in open_documents(s.JsonlSource(path=str(corpus))).read()]


def test_document_options(corpus: Path, cache: str) -> None:
    job = text_job(corpus, cache, reset_positions=True, document_mask=True)
    [batch] = job.loader((1, 24, 1), 0).next_step()
    assert batch.positions_BS is not None and batch.document_ids_BS is not None
    begins = batch.tokens_BS == 256
    assert begins.any()
    assert (batch.positions_BS[begins] == 0).all()
    assert (batch.labels_BS == -100).sum() > 0 and not (batch.labels_BS == 256).any()
    # All text of valid labels, and nothing for the frame's tokens.
    assert num_bytes(batch, TOKENIZER) == int(
        ((batch.labels_BS >= 0) & (batch.labels_BS < 256)).sum()
    )
    bare = text_job(
        corpus,
        cache,
        document_mask=True,
        add_bos=False,
        add_eos=False,
    )
    with pytest.raises(DataError, match=r"set data\.add_bos or data\.add_eos"):
        bare.loader((1, 1, 1), 0)


def _prefetchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "titan-prefetch"}


def test_prefetch_changes_nothing_and_state_is_of_what_was_handed_out(job: Job) -> None:
    # Loaders of other tests in this process may wait for the garbage collection.
    others = _prefetchers()
    plain, ahead = job.loader((1, 24, 1), 0), job.loader((1, 24, 1), 0, workers=1)
    with closing(ahead):
        for step in range(1, 6):
            np.testing.assert_array_equal(step_rows([ahead]), step_rows([plain]))
            assert ahead.state_dict() == plain.state_dict()
            assert ahead.state_dict()["position"] == step * 24
        [thread] = _prefetchers() - others
    assert not thread.is_alive()
    np.testing.assert_array_equal(step_rows([ahead]), step_rows([plain]))  # goes on after close
    ahead.close()


class _Counted(Samples):
    """Samples that count the calls of `get`, one for each step, and fail after `most`."""

    special_tokens = SpecialTokens(None, None)
    num_calls, most = 0, 99

    def get(self, indices: np.ndarray) -> np.ndarray:
        self.num_calls += 1
        if self.num_calls > self.most:
            raise DataError("shard 7 is gone")
        return np.zeros((len(indices), 5), dtype=np.int64)


def counted(depth: int) -> tuple[_Counted, Loader]:
    samples = _Counted()
    how: dict[str, Any] = {
        "share": ShardSpec(),
        "collate": collate_rows(samples, s.DataSection()),
    }
    section = s.DataloaderSection(num_workers=1, prefetch_factor=depth)
    return samples, Loader(samples, dataloader=section, **how)


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_the_thread_wakes_when_half_of_its_steps_are_taken(depth: int) -> None:
    """And not for each step: the training thread then waits for the interpreter."""
    samples, loader = counted(depth)
    ahead = []
    with closing(loader):
        for taken in range(1, 9):
            loader.next_step()
            # The thread is asleep again, or has had more time than it needs for these samples.
            time.sleep(0.05)
            ahead.append(samples.num_calls - taken)
    assert set(ahead) == {*range(depth // 2 + 1, depth + 1)}  # the half is left, and never less
    # A cycle down to the half and up again: else each step would be followed by a full queue.
    assert ahead.count(depth) <= 8 / (depth - depth // 2) + 1


def test_an_error_in_the_background_is_raised_by_next_step() -> None:
    samples, loader = counted(4)
    samples.most = 2
    with closing(loader):
        loader.next_step()
        loader.next_step()
        for _ in range(2):  # and again, rather than hang
            with pytest.raises(DataError, match="shard 7 is gone"):
                loader.next_step()


def validation_loader(
    data: s.DataSection, *, rank: int = 0, world: int = 1, **changes: Any
) -> Loader:
    return build_validation_loader(
        s.ValidationSection.model_validate({"local_batch_size": 4} | changes),
        training=training(),
        data=data,
        tokenizer=TOKENIZER,
        rank=rank,
        world=world,
    )


def test_validation_repeats_and_ends_with_the_text(corpus: Path, cache: str) -> None:
    data = text_job(corpus, cache, validation_fraction=0.1).data
    length = validation_loader(data).samples.num_samples
    assert length is not None and length > 8 and length % 4
    first, second = (list(validation_loader(data).validation_batches(2)) for _ in range(2))
    assert len(first) == 2
    assert all(
        torch.equal(a.tokens_BS, b.tokens_BS) for a, b in zip(first, second, strict=True)
    )
    assert not any((batch.labels_BS == IGNORED).any() for batch in first)
    for steps in (-1, length // 4 + 3):  # more than there is: the text is not read twice
        batches = list(validation_loader(data).validation_batches(steps))
        assert (len(batches) - 1) * 4 < length <= len(batches) * 4


@tabled("world, batch")
def test_validation_counts_every_sample_once_under_every_layout(
    corpus: Path, cache: str, world: int, batch: int
) -> None:
    data = text_job(corpus, cache, validation_fraction=0.1).data
    whole = validation_loader(data)
    length = whole.samples.num_samples
    assert length is not None and length > 20
    seen: dict[int, list[int]] = {}
    size, num_batches = 0, set()
    for rank in range(world):
        loader = validation_loader(data, rank=rank, world=world, local_batch_size=batch)
        batches = list(loader.validation_batches(-1))
        num_batches.add(len(batches))  # or a collective would wait for ever
        for one in batches:
            size += num_bytes(one, TOKENIZER)
            for row, labels in enumerate(one.labels_BS.tolist(), start=one.first_sample):
                if row >= length:
                    assert set(labels) == {IGNORED}
                else:
                    assert row not in seen
                    seen[row] = labels
    rows = whole.samples.get(np.arange(length))[:, 1:]
    assert [seen[row] for row in range(length)] == rows.tolist()
    assert len(num_batches) == 1 and size == TOKENIZER.byte_lengths[rows].sum()


def test_validation_on_a_stream_reads_it_once(
    hub: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    data = Job(s.HuggingFaceSource(path=str(hub)), cache=cache, validation_fraction=0.2).data
    loader = validation_loader(data)
    first = list(loader.validation_batches(3))
    with pytest.raises(DataError, match="a stream has no end"):
        loader.validation_batches(-1)
    monkeypatch.setattr(loader.samples, "get", None)
    assert all(a is b for a, b in zip(first, loader.validation_batches(3), strict=True))


def test_validation_on_a_dataset_of_its_own(corpus: Path, cache: str) -> None:
    data = Job(s.SyntheticSource(), cache=cache).data
    loader = validation_loader(data, dataset="jsonl", dataset_path=str(corpus), seq_len=16)
    [batch] = loader.validation_batches(1)
    assert batch.tokens_BS.shape == (4, 16)


def test_mistakes_are_told(corpus: Path, cache: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.validation_fraction"):
        validation_loader(text_job(corpus, cache).data)
    with pytest.raises(DataError, match=r"raise data\.validation_fraction"):
        validation_loader(text_job(corpus, cache, validation_fraction=1e-9).data)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="has 7 tokens, but one sequence needs 33"):
        Job(s.TextSource(path=str(tmp_path / "short.txt")), cache=cache).loader((1, 1, 1), 0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="choose another folder"):
        Job(s.JsonlSource(path=str(corpus)), cache=str(tmp_path / "file")).loader((1, 1, 1), 0)


def test_synthetic_ids_cover_the_vocabulary(cache: str) -> None:
    [batch] = Job(s.SyntheticSource(), cache=cache).loader((1, 200, 1), 0).next_step()
    assert set(batch.tokens_BS.flatten().tolist()) == set(range(258))
