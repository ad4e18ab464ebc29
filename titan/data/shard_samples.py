"""Give numbered rows of the tokens of finite text.

Sample i is row i mod N of epoch i // N, sent through that epoch's permutation, and nothing is kept between calls.
samples.py chooses between this and best_fit.py, which builds on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Samples
from titan.data.order import derive_key, permute
from titan.data.shards import TokenShards
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer
from titan.data.writer import TokenizationSpec


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Hold the options that all sources of a job share."""

    tokenizer: Tokenizer
    data: s.DataSection
    seq_len: int
    split: str
    seed: int
    rank: int = 0
    world: int = 1
    """Data-parallel ranks. Each reads a part of a stream."""

    @property
    def spec(self) -> TokenizationSpec:
        """Return how the job's documents become tokens."""
        data = self.data
        return TokenizationSpec(
            tokenizer=self.tokenizer,
            special_tokens=SpecialTokens.of(
                self.tokenizer, add_bos=data.add_bos, add_eos=data.add_eos
            ),
            validation_fraction=data.validation_fraction,
        )


class ShardSamples(Samples):
    """Give the samples of memory-mapped token shards, cut at every `seq_len` tokens."""

    def __init__(self, shards: TokenShards, options: SampleOptions, *, key: int, name: str) -> None:
        """Read shards in the order that `key` names for each epoch. name: the source's, for an error."""
        self.special_tokens, self._seq_len = shards.special_tokens, options.seq_len
        self._shards, self._data, self._key = shards, options.data, key
        self._num_samples = self._count_rows()
        if not self._num_samples:
            fix = "give it more text or lower seq_len"
            if shards.index.kinds:
                fix = "no conversation has an answer that ends within a sequence: raise seq_len"
            if shards.split == "validation":
                fix = "raise data.validation_fraction (for shards: prepare it again with --validation-fraction)"
                fix += ", set validation.dataset, or set validation.enable = false"
            raise DataError(
                f"the {shards.split} split of {name} has {shards.num_tokens} tokens, but one sequence needs "
                f"{self._seq_len + 1}; {fix}"
            )

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def _count_rows(self) -> int:
        """Return how many rows there are in all shards."""
        # One token more than the inputs, for the last label. What is left at the end makes no sample.
        return max(self._shards.num_tokens - 1, 0) // self._seq_len

    def _row(self, place: int, epoch: int) -> np.ndarray:
        # Consecutive rows overlap in one token: the last label of one is the first input of the next.
        begin, length = place * self._seq_len, self._shards.num_tokens
        if self._data.move_windows and epoch:
            begin = (begin + derive_key(self._key, "move", epoch) % length) % length
        # After the end of the text comes its beginning: a new document, as any other.
        count = min(self._seq_len + 1, length - begin)
        tokens = self._shards.read(begin, count=count)
        rest = self._seq_len + 1 - count
        return np.append(tokens, self._shards.read(0, count=rest)) if rest else tokens

    def get(self, indices: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(indices, self._num_samples)
        # A batch may span two epochs, which have different permutations.
        for epoch in np.unique(epochs) if self._data.shuffle else ():
            here = epochs == epoch
            key = derive_key(self._key, "epoch", int(epoch))
            places[here] = permute(places[here], length=self._num_samples, key=key)
        return self._shards.check(np.stack([*map(self._row, places.tolist(), epochs.tolist())]))
