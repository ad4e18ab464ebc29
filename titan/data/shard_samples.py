"""Give numbered rows of the tokens of finite text.

Sample i is row i mod N of epoch i // N, sent through that epoch's permutation, and nothing is kept between calls.

Where a job has rows of several lengths (titan/config/phases.py), the permutation is that of windows of the longest length. A
window is cut into shorter rows, which are mixed within a block of windows. So at the end of a block, all tokens of its windows
and no others are used, and rows of another length go on without a token twice.

samples.py chooses between this and best_fit.py, which builds on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Source
from titan.data.order import derive_key, permute
from titan.data.shards import TokenShards
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer
from titan.data.writer import TokenizationSpec

# Windows of the longest length whose rows are mixed: at most so many, and this part of an epoch.
_BLOCK, _BLOCKS = 1024, 64


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
    longest: int = 0
    """Tokens of the longest sequence of a run with phases, of which every length is a divisor. 0: a run of one phase."""
    num_lengths: int = 1
    """How many lengths sequences have in the phases of a run."""

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


class ShardSamples(Source):
    """Give the samples of memory-mapped token shards, cut at every `seq_len` tokens."""

    def __init__(self, shards: TokenShards, options: SampleOptions, *, key: int, name: str) -> None:
        """Read shards in the order that `key` names for each epoch. name: the source's, for an error."""
        self.special_tokens, self._seq_len = shards.special_tokens, options.seq_len
        self._shards, self._data, self._key = shards, options.data, key
        self._longest = options.longest or self._seq_len
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
                f"{self._longest + 1}; {fix}"
            )

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def _count_rows(self) -> int:
        """Return how many rows there are in all shards."""
        # One token more than the inputs, for the last label. What is left at the end makes no sample.
        windows = max(self._shards.num_tokens - 1, 0) // self._longest
        return windows * (self._longest // self._seq_len)

    def resize(self, seq_len: int) -> None:
        if seq_len != self._seq_len:
            self._seq_len = seq_len
            self._num_samples = self._count_rows()

    def round_up(self, tokens: int) -> int:
        unit = self._longest * (self._block if self._data.shuffle else 1)
        epoch, used = divmod(tokens, length := self._num_samples * self._seq_len)
        return epoch * length + min(-(-used // unit) * unit, length)

    @property
    def _block(self) -> int:
        """Return how many windows are mixed."""
        windows = self._num_samples * self._seq_len // self._longest
        return min(_BLOCK, max(1, windows // _BLOCKS))

    def _shuffled(self, places: np.ndarray, key: int) -> np.ndarray:
        """Return the rows that an epoch has at these places."""
        pieces = self._longest // self._seq_len
        windows, piece = np.divmod(places, pieces)
        num_windows = self._num_samples // pieces
        blocks = windows // self._block
        for block in np.unique(blocks).tolist() if pieces > 1 else ():
            here, begin = blocks == block, block * self._block
            rows = permute(
                places[here] - begin * pieces,
                length=min(self._block, num_windows - begin) * pieces,
                key=derive_key(key, "block", block),
            )
            windows[here], piece[here] = begin + rows // pieces, rows % pieces
        return permute(windows, length=num_windows, key=key) * pieces + piece

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
            places[here] = self._shuffled(places[here], key)
        return self._shards.check(np.stack([*map(self._row, places.tolist(), epochs.tolist())]))
