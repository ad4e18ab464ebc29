"""Order of samples: pure functions of (seed, epoch, index), which need no memory of earlier samples.

`permute` is a keyed bijection on [0, length): a Feistel network over the digits of index = left x side + right,
side = ceil(sqrt(length)), whose round is (left, right) -> (right, (left + F(right)) mod side). That is a bijection on
[0, side^2), at most 2 x sqrt(length) wider than the wanted range; an index that lands outside is sent through
again until it is inside ("cycle walking": Black and Rogaway, CT-RSA 2002), which keeps it a bijection.

`Blend` assigns sample i to a source: blocks of 1024 consecutive samples contain exactly the rounded share of each
source, in an order drawn from the key and the block's number.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np

# Four pseudorandom rounds make a pseudorandom permutation (Luby and Rackoff). Two are to spare.
_ROUNDS = 6
# The shares of a blend are exact over this many samples, so a share is precise to a tenth of a percent.
_BLOCK = 1024


@lru_cache(maxsize=256)  # a hash takes as long as copying a sample
def derive_key(*parts: int | str) -> int:
    """Return a 64-bit key that depends on every part, and is the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def permute(indices: np.ndarray, *, length: int, key: int) -> np.ndarray:
    """Send indices through the permutation of [0, length) that `key` selects.

    Args:
        indices: int64, in [0, length).
        length: size of the permutation.
        key: selects the permutation.

    Returns:
        int64, of the shape of `indices`.
    """
    assert ((indices >= 0) & (indices < length)).all(), f"indices outside [0, {length})"
    # The smallest square that holds every index.
    side = isqrt(length - 1) + 1
    round_keys = [derive_key(key, "round", number) for number in range(_ROUNDS)]
    result = _feistel(indices.astype(np.uint64), side=side, round_keys=round_keys)
    # Cycle walking: less than half of the indices take a second pass, and fewer take a third.
    while (outside := result >= length).any():
        result[outside] = _feistel(result[outside], side=side, round_keys=round_keys)
    return result.astype(np.int64)


def _feistel(index: np.ndarray, *, side: int, round_keys: list[int]) -> np.ndarray:
    left, right = index // side, index % side
    for round_key in round_keys:
        left, right = right, (left + _mix(right ^ round_key) % side) % side
    return left * side + right


def _mix(word: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (Steele et al., OOPSLA 2014), in the wrapping arithmetic of uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


class Blend:
    """Assignment of samples to sources: the source of sample i, and its number within that source."""

    def __init__(self, weights: list[float], *, key: int) -> None:
        """Divide a block among the sources.

        Args:
            weights: relative shares. A source with a weight above 0 gets at least one sample of each block.
            key: selects the order of the samples in each block.
        """
        assert 0 < len(weights) <= _BLOCK
        share = np.asarray(weights) / sum(weights) * _BLOCK
        self.counts = (share > 0).astype(np.int64)
        # Distribute the rest, so that the counts add up to exactly one block.
        for _ in range(_BLOCK - int(self.counts.sum())):
            self.counts[np.argmax(share - self.counts)] += 1  # to the source that lacks most
        self._key = key
        self._block = lru_cache(maxsize=8)(self._compute_block)

    def _compute_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample in a block, and the number of that source's samples before it in the block."""
        key = derive_key(self._key, "blend", block)
        slots = permute(np.arange(_BLOCK), length=_BLOCK, key=key)
        # `slots` is the block's permutation, and the sources own consecutive ranges of slots.
        source = np.searchsorted(np.cumsum(self.counts), slots, side="right")
        preceding = np.empty(_BLOCK, dtype=np.int64)
        for number, count in enumerate(self.counts):
            preceding[source == number] = np.arange(count)
        return source, preceding

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and the sample's number within that source."""
        block, place = divmod(index, _BLOCK)
        source, preceding = self._block(block)
        chosen = int(source[place])
        # Samples of the whole blocks before, and then of this block.
        return chosen, block * int(self.counts[chosen]) + int(preceding[place])

    def consumed(self, position: int) -> list[int]:
        """Return how many samples of each source come before sample `position`."""
        block, place = divmod(position, _BLOCK)
        inside = np.bincount(self._block(block)[0][:place], minlength=len(self.counts))
        return (block * self.counts + inside).tolist()  # pyrefly: ignore[bad-return]
