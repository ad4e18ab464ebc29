"""The order of samples: pure functions of (seed, epoch, index) that need no memory of what came before.

`permute` is a keyed bijection on [0, length): a Feistel network over the digits of index = left x side + right,
side = ceil(sqrt(length)), whose round is (left, right) -> (right, (left + F(right)) mod side). That is a bijection on
[0, side^2), at most 2 x sqrt(length) wider than the wanted range; an index that lands outside is sent through
again until it is inside ("cycle walking": Black and Rogaway, CT-RSA 2002), which keeps it a bijection.

`Blend` assigns sample i to a source: blocks of 1024 consecutive samples hold exactly the rounded share of each
source, in an order drawn from the key and the block's number. samples.py is the only caller.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt
from typing import TypeVar

import numpy as np

_WORD = (1 << 64) - 1
_ROUNDS = (
    6  # 4 give a pseudorandom permutation from pseudorandom rounds (Luby and Rackoff); 2 to spare
)

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _mix(word: IntOrArray) -> IntOrArray:
    """The finaliser of SplitMix64 (Steele et al., OOPSLA 2014), on a Python int or a uint64 array alike."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


@lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(derive_key(key, "round", number) for number in range(_ROUNDS))


def _feistel(index: IntOrArray, *, side: int, key: int) -> IntOrArray:
    left, right = index // side, index % side
    for round_key in _round_keys(key):
        left, right = right, (left + _mix(right ^ round_key) % side) % side
    return left * side + right


def permute(index: int, *, length: int, key: int) -> int:
    """Where `index` goes under the permutation of [0, length) that `key` names."""
    assert 0 <= index < length, f"index {index} is outside [0, {length})"
    side = isqrt(length - 1) + 1
    index = _feistel(index, side=side, key=key)
    while index >= length:
        index = _feistel(index, side=side, key=key)
    return index


def permute_array(indices: np.ndarray, *, length: int, key: int) -> np.ndarray:
    """`permute` of each element; int64 in, int64 out."""
    if not len(indices):
        return indices.astype(np.int64)
    assert indices.min() >= 0 and indices.max() < length, f"indices outside [0, {length})"
    side = isqrt(length - 1) + 1
    result = _feistel(indices.astype(np.uint64), side=side, key=key)
    while (outside := result >= length).any():
        result[outside] = _feistel(result[outside], side=side, key=key)
    return result.astype(np.int64)


class Blend:
    """Which source sample i comes from, and its number within that source."""

    def __init__(self, weights: list[float], *, key: int, block: int = 1024) -> None:
        """`weights` are relative; a source whose share rounds to nothing still gets one sample a block."""
        assert 0 < len(weights) <= block
        self.block = block
        self.counts = self._shares(weights)
        self._key = key
        self._layout = lru_cache(maxsize=8)(self._compute_layout)

    def _shares(self, weights: list[float]) -> np.ndarray:
        """Samples of each source in a block: rounded down, the rest to the largest remainders."""
        exact = np.asarray(weights, dtype=np.float64) / sum(weights) * self.block
        counts = np.maximum(np.floor(exact).astype(np.int64), 1)
        while (missing := self.block - int(counts.sum())) != 0:
            # One at a time: where the minimum of 1 took too much, the richest source gives it back.
            counts[int(np.argmax(exact - counts)) if missing > 0 else int(np.argmax(counts))] += (
                np.sign(missing)
            )
        return counts

    def _compute_layout(self, block_number: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its source, and how many of that source precede it in the block."""
        slots = permute_array(
            np.arange(self.block),
            length=self.block,
            key=derive_key(self._key, "blend", block_number),
        )
        source = np.searchsorted(np.cumsum(self.counts), slots, side="right")
        preceding = np.empty(self.block, dtype=np.int64)
        for number, count in enumerate(self.counts):
            preceding[source == number] = np.arange(count)
        return source, preceding

    def locate(self, index: int) -> tuple[int, int]:
        """(source, number within the source) of sample `index`."""
        block_number, place = divmod(index, self.block)
        source, preceding = self._layout(block_number)
        chosen = int(source[place])
        return chosen, block_number * int(self.counts[chosen]) + int(preceding[place])

    def consumed(self, position: int) -> list[int]:
        """How many samples of each source lie before sample `position`."""
        block_number, place = divmod(position, self.block)
        inside = np.bincount(self._layout(block_number)[0][:place], minlength=len(self.counts))
        return [int(n) for n in block_number * self.counts + inside]
