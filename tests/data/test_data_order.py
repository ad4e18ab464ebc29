"""The order of samples: permutations are keyed bijections, blends hold exact shares."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tables import tabled
from titan.data.order import Blend, derive_key, permute


def one(index: int, *, length: int, key: int) -> int:
    return int(permute(np.array([index]), length=length, key=key)[0])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_bijection(length: int) -> None:
    key = derive_key(7, "test", length)
    images = [one(index, length=length, key=key) for index in range(length)]
    assert sorted(images) == list(range(length))
    together = permute(np.arange(length), length=length, key=key)
    assert together.dtype == np.int64
    assert together.tolist() == images


def test_permute_depends_on_every_part_of_the_key() -> None:
    orders = {
        tuple(permute(np.arange(500), length=500, key=derive_key(seed, epoch, source)))
        for seed in (0, 1)
        for epoch in (0, 1)
        for source in (0, 1)
    }
    assert len(orders) == 8


def test_permute_is_the_same_on_every_machine() -> None:
    # Written down so that a change of the order, which would break every resume, cannot pass unnoticed.
    assert derive_key(0, "epoch", 0) == 745978622888957075
    assert permute(np.arange(8), length=8, key=42).tolist() == [4, 6, 3, 1, 7, 5, 2, 0]


def test_permute_spreads_neighbours() -> None:
    length = 100_000
    images = permute(np.arange(length), length=length, key=3)
    assert abs(np.corrcoef(np.arange(length), images)[0, 1]) < 0.02
    # Two random places are a third of the range apart on average.
    assert np.abs(np.diff(images)).mean() == pytest.approx(length / 3, rel=0.02)


def test_permute_handles_a_trillion_samples() -> None:
    length = 10**12 + 7
    places = np.array([0, 1, 10**6, length - 1])
    images = permute(places, length=length, key=5)
    assert len(set(images.tolist())) == 4
    assert images.tolist() == [one(int(place), length=length, key=5) for place in places]


@tabled("weights, shares")
def test_blend_holds_exact_shares_in_every_block(
    weights: list[float], shares: list[int]
) -> None:
    blend = Blend(weights, key=11)
    assert blend.counts.tolist() == shares
    next_of = [0] * len(weights)
    orders = []
    for block in range(3):
        sources = []
        for index in range(block * 1024, (block + 1) * 1024):
            assert blend.consumed(index) == next_of
            source, within = blend.locate(index)
            assert (
                within == next_of[source]
            )  # each source goes through its own samples one by one
            next_of[source] += 1
            sources.append(source)
        assert np.bincount(sources, minlength=len(weights)).tolist() == shares
        orders.append(tuple(sources))
    assert len(set(orders)) == 3


def test_blend_locates_any_sample_at_once() -> None:
    weights = [2.0, 1.0]
    forwards = Blend(weights, key=1)
    sequence = [forwards.locate(index) for index in range(5000)]
    assert [Blend(weights, key=1).locate(index) for index in (4999, 0, 2048)] == [
        sequence[4999],
        sequence[0],
        sequence[2048],
    ]
    assert [Blend(weights, key=2).locate(index)[0] for index in range(100)] != [
        s for s, _ in sequence[:100]
    ]
