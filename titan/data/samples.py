"""Make one endless, numbered sequence of rows of tokens from every kind of source.

A sample has seq_len + 1 tokens, and begins seq_len tokens after the one before it, so that each token is predicted once an
epoch. For finite text, sample i is row i mod N of epoch i // N, sent through that epoch's permutation, and nothing is kept
between calls. Raw text may still grow while it is read. So in its first epoch, the rows of each shard have a permutation, one
shard after another, and the order does not depend on how fast the text is tokenised. A blend asks its sources for their own
sample numbers (order.Blend).

`build_samples` makes them from source sections, and loader.py reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import Samples
from titan.data.cache import open_cached
from titan.data.order import Blend, derive_key, permute
from titan.data.shards import TokenShards
from titan.data.sources import TextStream
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import StreamSamples
from titan.data.tokenizer import Tokenizer
from titan.data.writer import TokenizationSpec


class ShardSamples(Samples):
    """Give the samples of memory-mapped token shards, cut at every `seq_len` tokens."""

    def __init__(
        self, shards: TokenShards, options: SampleOptions, *, key: int, name: str, by_shard: bool
    ) -> None:
        """Read shards in the order that `key` names for each epoch.

        Args:
            name: the source's, for an error.
            by_shard: shuffle the first epoch within each shard, and read it while the shards are growing. Otherwise all
                shards are waited for when the first sample is read.
        """
        self.special_tokens, self._seq_len = shards.special_tokens, options.seq_len
        self._shards, self._data, self._key = shards, options.data, key
        self._name, self._by_shard = name, by_shard
        if shards.is_complete:
            self._checked_ends()

    @property
    def num_samples(self) -> int | None:
        self._shards.look()
        self._shards.wait(lambda: self._by_shard)
        return int(self._checked_ends()[-1]) if self._shards.is_complete else None

    def _ends(self) -> np.ndarray:
        """Return how many rows there are up to the end of each shard, int64[shards]."""
        # One token more than the inputs, for the last label. What is left at the end makes no sample.
        return (self._shards.ends - 1) // self._seq_len

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

    def _checked_ends(self) -> np.ndarray:
        """Return `_ends()`. Raises DataError if no row will come."""
        ends, split = self._ends(), self._shards.split
        if self._shards.is_complete and not ends[-1:].any():
            fix = "give it more text or lower seq_len"
            if split == "validation":
                fix = "raise data.validation_fraction (for shards: prepare it again with --validation-fraction)"
                fix += ", set validation.dataset, or set validation.enable = false"
            raise DataError(
                f"the {split} split of {self._name} has {self._shards.num_tokens} tokens, but one sequence needs "
                f"{self._seq_len + 1}; {fix}"
            )
        return ends

    def get(self, indices: np.ndarray) -> np.ndarray:
        last = indices.max()
        self._shards.wait(lambda: self._by_shard and (self._ends() > last).any())
        ends = self._checked_ends()
        # While text is growing, these are rows of the first epoch.
        epochs, places = np.divmod(indices, ends[-1])
        # A batch may span two epochs, or two shards, which have different permutations.
        for epoch in np.unique(epochs) if self._data.shuffle else ():
            ends_now = ends if self._by_shard and epoch == 0 else ends[-1:]
            parts = np.where(epochs == epoch, np.searchsorted(ends_now, places, side="right"), -1)
            for part in np.unique(parts[parts >= 0]).tolist():
                begin, end = int(ends_now[part - 1]) if part else 0, int(ends_now[part])
                key = derive_key(self._key, "epoch", int(epoch), *([part] if part else []))
                moved = permute(places[parts == part] - begin, length=end - begin, key=key)
                places[parts == part] = begin + moved
        return self._shards.check(np.stack([*map(self._row, places.tolist(), epochs.tolist())]))


class SyntheticSamples(Samples):
    """Draw uniformly random ids without documents. Each sample has its own generator."""

    special_tokens = SpecialTokens(None, None)

    def __init__(self, *, vocab_size: int, seq_len: int, key: int) -> None:
        self._vocab_size, self._seq_len, self._key = vocab_size, seq_len, key

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> np.ndarray:
        # A generator by number, so that any rank makes any sample without those before it.
        generator = np.random.Generator(np.random.Philox(key=derive_key(self._key, index)))
        return generator.integers(self._vocab_size, size=self._seq_len + 1)


class BlendSamples(Samples):
    """Mix several sources in proportion to their weights."""

    def __init__(self, parts: Sequence[Samples], *, weights: list[float], key: int) -> None:
        self._parts = parts
        self._blend = Blend(weights, key=key)
        # Synthetic ids have no marks, and text that does has the same ones.
        marks = [part.special_tokens for part in parts]
        self.special_tokens = SpecialTokens(
            next((m.bos_id for m in marks if m.bos_id is not None), None),
            next((m.eos_id for m in marks if m.eos_id is not None), None),
        )

    @property
    def num_samples(self) -> int | None:
        lengths = [part.num_samples for part in self._parts]
        known = [length for length in lengths if length is not None]
        return sum(known) if len(known) == len(lengths) else None

    def seek(self, position: int, *, bookmark: Any = None) -> None:
        marks = (bookmark or {}).get("parts", [])
        if len(marks) != len(self._parts):
            marks = [None] * len(self._parts)
        # How far each source was read at this position of the blend.
        numbers = self._blend.consumed(position)
        for part, number, mark in zip(self._parts, numbers, marks, strict=True):
            part.seek(number, bookmark=mark)

    def bookmark(self) -> dict[str, Any] | None:
        marks = [part.bookmark() for part in self._parts]
        return {"parts": marks} if any(marks) else None

    def get(self, indices: np.ndarray) -> np.ndarray:
        sources, places = np.array([self._blend.locate(int(index)) for index in indices]).T
        # Each source is asked once for all of its rows.
        rows: dict[int, np.ndarray] = {}
        for number, part in enumerate(self._parts):
            if len(here := np.flatnonzero(sources == number)):
                rows.update(zip(here.tolist(), part.get(places[here]), strict=True))
        return np.stack([rows[slot] for slot in range(len(indices))])


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Hold the options that all sources of a job share."""

    tokenizer: Tokenizer
    data: s.DataSection
    seq_len: int
    split: str
    seed: int
    by_shard: bool = False
    """Read raw text while it is tokenised. Not for validation: the first rows may not stand for all of the text."""

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


def build_samples(sources: Sequence[s.Section], *, options: SampleOptions) -> Samples:
    """Return the samples of one source, or the blend of several by their weights. Raises DataError."""
    # Numbered, so that two sources of equal text get different orders.
    parts = [_open_source(source, number, options) for number, source in enumerate(sources)]
    if len(parts) == 1:
        return parts[0]
    weights = [getattr(source, "weight", 1.0) for source in sources]
    return BlendSamples(
        parts, weights=weights, key=derive_key(options.seed, options.split, "blend")
    )


def _open_source(section: s.Section, number: int, options: SampleOptions) -> Samples:
    tokenizer, seq_len, data = options.tokenizer, options.seq_len, options.data
    # Decides the order of this source: another seed, split or place in the list gives another one.
    key = derive_key(options.seed, options.split, number)
    if isinstance(section, s.SyntheticSource):
        return SyntheticSamples(vocab_size=tokenizer.vocab_size, seq_len=seq_len, key=key)
    if isinstance(section, s.ShardsSource):
        shards = TokenShards(Path(section.path).expanduser(), split=options.split)
        _check_tokenizer(shards, tokenizer)
        name = f"the shards in '{section.path}'"
        return _shard_samples(shards, options, key=key, name=name, by_shard=False)
    if options.split == "validation" and not data.validation_fraction:
        raise DataError(
            "validation has no text: set data.validation_fraction (0.01 holds out every hundredth document) "
            "or validation.dataset"
        )
    spec = options.spec
    if isinstance(section, s.HuggingFaceSource) and section.streaming:
        if data.packing == "best_fit":
            raise DataError(
                f"data.packing = 'best_fit' packs finite text, and {section.path} is a stream; set streaming = false"
            )
        depends_on = (repr(section), tokenizer.fingerprint, str(spec.special_tokens), seq_len)
        return StreamSamples(
            TextStream(section),
            tokenizer=tokenizer,
            special_tokens=spec.special_tokens,
            seq_len=seq_len,
            shuffle_buffer=section.shuffle_buffer if data.shuffle else 0,
            seed=key,
            keep=lambda text: spec.split_of(text) == options.split,
            identity=derive_key(key, *depends_on, str(data.validation_fraction), data.shuffle),
        )
    # All other text is finite: one process tokenises it, and all map its shards.
    shards, name = open_cached(
        section, spec=spec, cache_folder=data.cache_folder, split=options.split
    )
    return _shard_samples(shards, options, key=key, name=name, by_shard=options.by_shard)


def _shard_samples(shards: TokenShards, options: SampleOptions, **named: Any) -> ShardSamples:
    if options.data.packing == "cut":
        return ShardSamples(shards, options, **named)
    from titan.data.best_fit import BestFitSamples

    return BestFitSamples(shards, options, **named)


def _check_tokenizer(shards: TokenShards, tokenizer: Tokenizer) -> None:
    index = shards.index
    if index.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"'{shards.folder}' was tokenised with another tokenizer ({index.tokenizer}, {index.vocab_size} ids, "
            f"{index.fingerprint}) than this job's ({tokenizer.kind}, {tokenizer.vocab_size} ids, "
            f"{tokenizer.fingerprint}); set [tokenizer] to that one or run `titan prepare` again"
        )
