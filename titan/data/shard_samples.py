"""Numbered samples of finite text, which is in token shards.

Sample i is sequence i mod N of epoch i // N, sent through that epoch's permutation. Nothing is kept between calls.

If a job has sequences of several lengths (titan/config/phases.py), it permutes windows of the longest length. Each window is
cut into shorter sequences, and these are mixed within a block of windows. So at the end of a block, exactly the tokens of its
windows are used, and sequences of another length can follow without a repeated token.

samples.py chooses between this file and best_fit.py, which builds on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Source
from titan.data.order import derive_key, permute
from titan.data.shards import TokenShards
from titan.data.special_tokens import SpecialTokens, text_fingerprint
from titan.data.tokenizer import Tokenizer
from titan.data.writer import TokenizationSpec

# Windows in a block: at most the first number, and at most 1 / 64 of an epoch.
_BLOCK, _BLOCKS = 1024, 64


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options that all sources of a job share."""

    tokenizer: Tokenizer
    data: s.DataSection
    seq_len: int
    split: str
    seed: int
    rank: int = 0
    world: int = 1
    """Number of data-parallel ranks. Each rank reads its part of a stream."""
    longest: int = 0
    """Tokens of the longest sequence in a run with phases. Every length divides it. 0 means a run of one phase."""
    num_lengths: int = 1
    """Number of distinct sequence lengths in the phases of a run."""

    @property
    def spec(self) -> TokenizationSpec:
        """Return the settings by which the job's documents become tokens."""
        data = self.data
        return TokenizationSpec(
            tokenizer=self.tokenizer,
            special_tokens=SpecialTokens.of(
                self.tokenizer, add_bos=data.add_bos, add_eos=data.add_eos
            ),
            validation_fraction=data.validation_fraction,
        )


class ShardSamples(Source):
    """Samples of memory-mapped token shards, cut at every `seq_len` tokens."""

    def __init__(
        self, shards: TokenShards, options: SampleOptions, *, key: int, name: str
    ) -> None:
        """Open the samples of a source.

        Args:
            shards: the tokens of the source.
            options: options that all sources share.
            key: selects the order of each epoch.
            name: name of the source, for an error message.

        Raises:
            DataError: the text is shorter than one sequence.
        """
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
        """Return the number of sequences in all shards."""
        # The last label needs one token more than the inputs. Tokens left over at the end make no sample.
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
        """Return the number of windows in a block."""
        windows = self._num_samples * self._seq_len // self._longest
        return min(_BLOCK, max(1, windows // _BLOCKS))

    def _shuffled(self, places: np.ndarray, key: int) -> np.ndarray:
        """Return the sequences that an epoch has at these places."""
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

    def _row(self, place: int, read: Callable[..., np.ndarray]) -> np.ndarray:
        # Consecutive sequences overlap in one token: the last label of a sequence is the first input of the next sequence.
        return read(place * self._seq_len, count=self._seq_len + 1)

    def get(self, indices: np.ndarray) -> np.ndarray:
        return self._shards.check(self._rows(indices, self._shards.read))

    def documents(self, indices: np.ndarray) -> np.ndarray:
        return self._rows(indices, self._shards.documents)

    def leave_out(self, rows: Sequence[int]) -> None:
        self._shards.leave_out(rows)

    def _rows(self, indices: np.ndarray, read: Callable[..., np.ndarray]) -> np.ndarray:
        """Return what `read(start, count=...)` finds for the tokens of samples."""
        epochs, places = np.divmod(indices, self._num_samples)
        # A batch may span two epochs, which have different permutations.
        for epoch in np.unique(epochs) if self._data.shuffle else ():
            here = epochs == epoch
            key = derive_key(self._key, "epoch", int(epoch))
            places[here] = self._shuffled(places[here], key)
        return np.stack([self._row(place, read) for place in places.tolist()])


def open_shards(path: str, options: SampleOptions) -> TokenShards:
    """Return the shards of a split that `titan prepare` wrote.

    Raises:
        DataError: they are damaged, or of another tokenizer.
    """
    shards = TokenShards(Path(path).expanduser(), split=options.split)
    tokenizer = options.tokenizer
    index = shards.index
    marks = {index.bos_id, index.eos_id} <= {tokenizer.bos_id, tokenizer.eos_id, None}
    expected = text_fingerprint(tokenizer, has_chats=index.kinds)
    if index.fingerprint != expected or not marks:
        raise DataError(
            f"'{shards.folder}' was tokenized with another tokenizer ({index.tokenizer}, {index.vocab_size} ids, "
            f"{index.fingerprint}) than this job's ({tokenizer.kind}, {tokenizer.vocab_size} ids, "
            f"{expected}), or with other begin and end tokens; set [tokenizer] to that one or run `titan prepare` again"
        )
    return shards
