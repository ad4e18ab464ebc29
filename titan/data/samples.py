"""Make one endless, numbered sequence of rows of tokens from every kind of source.

A sample has seq_len + 1 tokens, and begins seq_len tokens after the one before it, so that each token is predicted once an
epoch. For finite text, sample i is row i mod N of epoch i // N, sent through that epoch's permutation, and nothing is kept
between calls. A blend asks its sources for their own sample numbers (order.Blend).

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
from titan.data.cache import cached_shards
from titan.data.order import Blend, derive_key, permute
from titan.data.shards import TokenShards
from titan.data.sources import TextStream, open_documents
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import StreamSamples
from titan.data.tokenizer import Tokenizer
from titan.data.writer import TokenizationSpec


class ShardSamples(Samples):
    """Give the samples of memory-mapped token shards."""

    def __init__(self, shards: TokenShards, *, seq_len: int, key: int | None) -> None:
        """Read shards in the order that `key` names for each epoch. None reads them as they are stored."""
        self.special_tokens = shards.special_tokens
        # One token more than the inputs, for the last label. What is left at the end makes no
        # sample.
        self.num_samples = self._length = (shards.num_tokens - 1) // seq_len
        self._shards, self._seq_len, self._key = shards, seq_len, key

    def get(self, indices: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(indices, self._length)
        if self._key is not None:
            for epoch in np.unique(epochs):
                # A batch may span two epochs, which have different permutations.
                now = epochs == epoch
                key = derive_key(self._key, "epoch", int(epoch))
                places[now] = permute(places[now], length=self._length, key=key)
        read, size = self._shards.read, self._seq_len
        # Consecutive samples overlap in one token: the last label of one is the first input of the
        # next.
        return np.stack([read(int(place) * size, count=size + 1) for place in places])


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
        lengths = [part.num_samples for part in parts if part.num_samples is not None]
        self.num_samples = sum(lengths) if len(lengths) == len(parts) else None
        # Synthetic ids have no marks, and text that does has the same ones.
        marks = [part.special_tokens for part in parts]
        self.special_tokens = SpecialTokens(
            next((m.bos_id for m in marks if m.bos_id is not None), None),
            next((m.eos_id for m in marks if m.eos_id is not None), None),
        )

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
        return _shard_samples(shards, key, options, name=f"the shards in '{section.path}'")
    if options.split == "validation" and not data.validation_fraction:
        raise DataError(
            "validation has no text: set data.validation_fraction (0.01 holds out every hundredth document) "
            "or validation.dataset"
        )
    spec = options.spec
    if isinstance(section, s.HuggingFaceSource) and section.streaming:
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
    documents = open_documents(section)
    # All other text is finite: the first process tokenises it, and the others map its shards.
    folder = cached_shards(documents, spec=spec, cache_folder=data.cache_folder)
    shards = TokenShards(folder, split=options.split)
    return _shard_samples(shards, key, options, name=documents.name)


def _shard_samples(
    shards: TokenShards, key: int, options: SampleOptions, *, name: str
) -> ShardSamples:
    index, tokenizer = shards.index, options.tokenizer
    if index.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"'{shards.folder}' was tokenised with another tokenizer ({index.tokenizer}, {index.vocab_size} ids, "
            f"{index.fingerprint}) than this job's ({tokenizer.kind}, {tokenizer.vocab_size} ids, "
            f"{tokenizer.fingerprint}); set [tokenizer] to that one or run `titan prepare` again"
        )
    if shards.num_tokens <= options.seq_len:
        fix = "give it more text or lower seq_len"
        if options.split == "validation":
            fix = "raise data.validation_fraction (for shards: prepare it again with --validation-fraction)"
            fix += ", or set validation.dataset"
        raise DataError(
            f"the {options.split} split of {name} has {shards.num_tokens} tokens, but one sequence needs "
            f"{options.seq_len + 1}; {fix}"
        )
    return ShardSamples(shards, seq_len=options.seq_len, key=key if options.data.shuffle else None)
