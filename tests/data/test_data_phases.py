"""Data over phases: each source goes on from its place, whatever the length, the batch and the weights."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.data.test_data_streams import ListStream, bytes_tokenizer
from tests.support.tables import table
from titan.config import schema as s
from titan.data import DataError
from titan.data.base import ShardSpec, Source
from titan.data.loader import Loader
from titan.data.samples import BlendSamples
from titan.data.shard_samples import SampleOptions, ShardSamples
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import StreamSamples

LONGEST = 64
NO_MARKS = SpecialTokens(None, None)


class Numbered:
    """Shards whose tokens are their own places, so that each row says which tokens it has."""

    special_tokens, split = NO_MARKS, "train"

    def __init__(self, num_tokens: int, first: int) -> None:
        self.num_tokens, self.first = num_tokens, first

    def read(self, begin: int, *, count: int) -> np.ndarray:
        return self.first + np.arange(begin, begin + count)

    def check(self, rows: np.ndarray) -> np.ndarray:
        return rows


def shards(
    num_tokens: int, *, key: int = 1, seq_len: int = 16, first: int = 0, **data: Any
) -> ShardSamples:
    options = SampleOptions(
        tokenizer=bytes_tokenizer(),
        data=s.DataSection(**data),
        seq_len=seq_len,
        split="train",
        seed=0,
        longest=LONGEST,
    )
    # pyrefly: ignore[bad-argument-type]
    return ShardSamples(Numbered(num_tokens, first), options, key=key, name="numbers")


def loader(
    *sources: Source, rank: int = 0, world: int = 1, workers: int = 0, weights: Any = None
) -> Loader:
    weights = weights or [1.0] * len(sources)
    return Loader(
        BlendSamples(sources, weights=weights, key=3, seq_len=16),
        share=ShardSpec(rank=rank, world=world, batch=8 // world),
        collate=lambda rows, first_sample: rows,
        dataloader=s.DataloaderSection(num_workers=workers, pin_memory=False),
    )


# (first step, batch, length, weights): a ramp, longer rows, shorter ones, another blend.
PHASES = table(__file__, "phases")
STEPS = 24


def run(of: Loader, *, first: int = 1, last: int = STEPS) -> list[np.ndarray]:
    """Return the rows of the steps `first` to `last`, entering phases as the trainer does."""
    steps, entered = [], None
    for step in range(first, last + 1):
        begun = [phase for phase in PHASES if phase[0] <= step]
        if begun and begun[-1] is not entered:
            entered = _, batch, seq_len, weights = begun[-1]
            batch //= of.share.world
            of.change(batch=batch, accumulation=1, seq_len=seq_len, weights=weights)
        steps += of.next_step()
    return steps


@pytest.mark.parametrize("data", [{}, {"shuffle": False}], ids=str)
def test_no_token_comes_twice_in_an_epoch_and_few_are_left_out(data: Any) -> None:
    source = shards(200_000, **data)
    of = loader(source)
    rows = run(of, last=13)
    inputs = np.concatenate([row[:, :-1].ravel() for row in rows])
    assert len(inputs) == 3 * 8 * 16 + 5 * 24 * 16 + 5 * 8 * 64
    assert len(np.unique(inputs)) == len(inputs)
    # Then on to the end of the epoch: what is left out is at most a block of windows at the change of length.
    place = of.state_dict()["part"]["tokens"][0] + 5 * 8 * 64
    rest = range(place // LONGEST, 199_999 // LONGEST)
    tail = source.get(np.array(rest))[:, :-1].ravel()
    seen = np.concatenate([inputs, tail])
    assert len(np.unique(seen)) == len(seen)
    assert 200_000 - len(seen) <= 200_000 / 64 + LONGEST


def test_short_rows_of_a_window_are_spread_over_many_batches() -> None:
    rows = shards(2_000_000).get(np.arange(256))
    windows, counts = np.unique(rows[:, 0] // LONGEST, return_counts=True)
    assert len(windows) > 190 and counts.max() <= 4


def test_a_resume_with_other_weights_goes_on_in_each_source() -> None:
    """Without a phase: an edited job reads no token again and leaves none out, at the old shares before and the new ones after."""
    sources = (shards(200_000), shards(400_000, key=2, first=1_000_000))

    def tokens(of: Loader, steps: int) -> np.ndarray:
        return np.concatenate([of.next_step()[0][:, :-1].ravel() for _ in range(steps)])

    with closing(loader(*sources)) as of:
        before = tokens(of, 40)
        state = json.loads(json.dumps(of.state_dict()))
    edited = [1.0, 9.0]
    with closing(loader(*sources, weights=edited)) as of:
        of.load_state_dict(state)
        of.change(batch=8, accumulation=1, seq_len=16, weights=edited)  # as a trainer begins
        after = tokens(of, 40)
    assert len(np.unique([before, after])) == len(before) + len(after)
    with closing(loader(sources[0])) as of:
        of.load_state_dict(state)
        with pytest.raises(DataError, match="the place in 2 sources, and this job has 1"):
            of.next_step()
    shares = [(found >= 1_000_000).mean() for found in (before, after)]
    assert shares == pytest.approx([0.5, 0.9], abs=0.02)


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_in_any_step_it_goes_on_exactly(workers: int) -> None:
    def fresh(**share: int) -> Loader:
        return loader(shards(200_000), shards(50_000, key=2), workers=workers, **share)

    states = []
    with closing(fresh()) as of:
        whole = []
        for step in range(1, STEPS + 1):
            # Entering a phase again changes nothing.
            whole += run(of, first=step, last=step)
            states.append(json.dumps(of.state_dict()))
    for step in range(1, STEPS):
        with closing(fresh()) as of:
            of.load_state_dict(json.loads(states[step - 1]))
            for mine, theirs in zip(run(of, first=step + 1), whole[step:], strict=True):
                np.testing.assert_array_equal(mine, theirs)
    # On two ranks the same samples.
    of_ranks = [fresh(rank=rank, world=2) for rank in range(2)]
    parts = zip(*(run(of) for of in of_ranks), strict=True)
    for mine, theirs in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(mine), theirs)
    for of in of_ranks:
        of.close()


def test_each_source_goes_on_from_its_place_when_weights_change() -> None:
    """Its rows over all phases are those that it gives alone, one after another."""
    alone = [shards(200_000).get(np.arange(400)), shards(50_000, key=2).get(np.arange(400))]
    of = loader(shards(200_000), shards(50_000, key=2))
    rows = list(of.next_step()[0])
    for weights in ([1.0, 0.0], [1.0, 3.0], [0.0, 1.0]):
        of.change(batch=32, accumulation=1, seq_len=16, weights=weights)
        rows += [row for _ in range(3) for row in of.next_step()[0]]
    taken = [0, 0]
    for row in rows:
        source = next(n for n in (0, 1) if (row == alone[n][taken[n]]).all())
        taken[source] += 1
    assert sum(taken) == 8 + 9 * 32 and min(taken) > 96


def test_a_stream_goes_on_with_the_next_token() -> None:
    texts = [f"document {number} of a stream" for number in range(200)]
    made = StreamSamples(
        ListStream(texts),  # pyrefly: ignore[bad-argument-type]
        tokenizer=bytes_tokenizer(),
        special_tokens=SpecialTokens(256, 257),
        seq_len=16,
        shuffle_buffer=0,
        seed=3,
    )
    joined = [t for text in texts for t in (256, *bytes_tokenizer().encode(text), 257)]
    inputs = np.concatenate([row[:, :-1].ravel() for row in run(loader(made), last=13)])
    np.testing.assert_array_equal(inputs, joined[: len(inputs)])
