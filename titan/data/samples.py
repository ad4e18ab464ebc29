"""Samples: one endless, numbered sequence of token rows, whatever they are made from.

Sample i has seq_len + 1 tokens, seq_len apart from the next of its text, so that each token is predicted once
an epoch. For finite text, sample i is row i mod N of epoch i // N, sent through that epoch's permutation; nothing
is kept between calls. A blend asks its sources for their own sample numbers (order.Blend).

`build_samples` makes them from source sections; loader.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan.config import sections as s
from titan.data.base import Layout, Samples
from titan.data.cache import cached_shards
from titan.data.errors import DataError
from titan.data.order import Blend, derive_key, permute_array
from titan.data.packing import Framing
from titan.data.shards import TokenShards
from titan.data.sources import TextStream, in_validation, open_documents
from titan.data.streams import StreamSamples
from titan.data.tokenizer import Tokenizer
from titan.data.writer import Recipe


class ShardSamples(Samples):
    """Samples of memory-mapped token shards."""

    def __init__(self, shards: TokenShards, *, seq_len: int, key: int | None, name: str) -> None:
        """`key` names the order of each epoch; None leaves samples as they lie."""
        self.framing = shards.framing
        length = (shards.num_tokens - 1) // seq_len
        if length < 1:
            raise DataError(
                f"{name} has {shards.num_tokens} tokens, but one sequence needs {seq_len + 1}; "
                "give it more text or lower seq_len"
            )
        self.num_samples = self._length = length
        self._shards, self._seq_len, self._key = shards, seq_len, key

    def get(self, indices: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(indices, self._length)
        if self._key is not None:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = derive_key(self._key, "epoch", int(epoch))
                places[now] = permute_array(places[now], length=self._length, key=key)
        read, size = self._shards.read, self._seq_len
        return np.stack([read(int(place) * size, count=size + 1) for place in places])


class SyntheticSamples(Samples):
    """Uniformly random ids, each sample from a generator of its own; framed by nothing."""

    num_samples = None

    def __init__(self, *, vocab_size: int, seq_len: int, key: int) -> None:
        self.framing = Framing(None, None)
        self._vocab_size, self._seq_len, self._key = vocab_size, seq_len, key

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=derive_key(self._key, index)))
        return generator.integers(self._vocab_size, size=self._seq_len + 1)


class BlendSamples(Samples):
    """Several sources in proportion to their weights."""

    def __init__(self, parts: Sequence[Samples], *, weights: list[float], key: int) -> None:
        self._parts = parts
        self._blend = Blend(weights, key=key)
        lengths = [part.num_samples for part in parts]
        self.num_samples = None if None in lengths else sum(length or 0 for length in lengths)
        marking = [part.framing for part in parts if part.framing.marks_boundaries]
        self.framing = Framing(
            next((f.bos_id for f in marking if f.bos_id is not None), None),
            next((f.eos_id for f in marking if f.eos_id is not None), None),
        )

    def seek(self, position: int, *, layout: Layout | None, bookmark: Any) -> None:
        known = isinstance(bookmark, list) and len(bookmark) == len(self._parts)
        marks = bookmark if known else [None] * len(self._parts)
        for part, consumed, mark in zip(
            self._parts, self._blend.consumed(position), marks, strict=True
        ):
            # A rank's share of one source within a blend follows no pattern, so every lane is wanted.
            part.seek(consumed, layout=None, bookmark=mark)

    def bookmark(self) -> list[Any] | None:
        marks = [part.bookmark() for part in self._parts]
        return marks if any(mark is not None for mark in marks) else None

    def get(self, indices: np.ndarray) -> np.ndarray:
        places = np.array([self._blend.locate(int(index)) for index in indices])
        rows: list[np.ndarray] = [np.empty(0)] * len(indices)
        for number, part in enumerate(self._parts):
            here = np.flatnonzero(places[:, 0] == number)
            if len(here):
                for slot, row in zip(here, part.get(places[here, 1]), strict=True):
                    rows[slot] = row
        return np.stack(rows)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What sources have in common when they become samples."""

    tokenizer: Tokenizer
    framing: Framing
    seq_len: int
    split: str
    validation_fraction: float
    shuffle: bool
    seed: int
    cache_folder: str

    def describe(self) -> str:
        """All that a stream's samples depend on besides the stream and its key."""
        parts = (self.tokenizer.fingerprint, self.framing, self.seq_len, self.split)
        return repr((*parts, self.validation_fraction, self.shuffle))


def build_samples(sources: Sequence[s.Section], *, options: SampleOptions) -> Samples:
    """The samples of one source, or the blend of several by their weights."""
    parts = [_open_source(source, number, options) for number, source in enumerate(sources)]
    if len(parts) == 1:
        return parts[0]
    weights = [getattr(source, "weight", 1.0) for source in sources]
    return BlendSamples(
        parts, weights=weights, key=derive_key(options.seed, options.split, "blend")
    )


def _open_source(section: s.Section, number: int, options: SampleOptions) -> Samples:
    key = derive_key(options.seed, options.split, number)
    if isinstance(section, s.SyntheticSource):
        return SyntheticSamples(
            vocab_size=options.tokenizer.vocab_size, seq_len=options.seq_len, key=key
        )
    if isinstance(section, s.HuggingFaceSource) and section.streaming:
        return StreamSamples(
            TextStream(section),
            tokenizer=options.tokenizer,
            framing=options.framing,
            seq_len=options.seq_len,
            shuffle_buffer=section.shuffle_buffer if options.shuffle else 0,
            seed=key,
            keep=_keep(options),
            identity=derive_key(key, repr(section), options.describe()),
        )
    folder, name = _shard_folder(section, options)
    shards = TokenShards(folder, split=options.split)
    _check_shards(shards, options, prepared=isinstance(section, s.ShardsSource))
    label = f"the {options.split} split of {name}"
    return ShardSamples(
        shards, seq_len=options.seq_len, key=key if options.shuffle else None, name=label
    )


def _keep(options: SampleOptions) -> Callable[[str], bool]:
    wanted = options.split == "validation"
    return lambda text: in_validation(text, fraction=options.validation_fraction) == wanted


def _shard_folder(section: s.Section, options: SampleOptions) -> tuple[Path, str]:
    if isinstance(section, s.ShardsSource):
        return Path(section.path).expanduser(), f"the shards in '{section.path}'"
    documents = open_documents(section)
    recipe = Recipe(
        tokenizer=options.tokenizer,
        framing=options.framing,
        validation_fraction=options.validation_fraction,
    )
    return cached_shards(
        documents, recipe=recipe, cache_folder=options.cache_folder
    ), documents.name


def _check_shards(shards: TokenShards, options: SampleOptions, *, prepared: bool) -> None:
    index = shards.index
    if index.fingerprint != options.tokenizer.fingerprint:
        raise DataError(
            f"'{shards.folder}' was tokenised with another tokenizer ({index.tokenizer}, {index.vocab_size} ids, "
            f"{index.fingerprint}) than this job's ({options.tokenizer.kind}, {options.tokenizer.vocab_size} ids, "
            f"{options.tokenizer.fingerprint}); set [tokenizer] to that one or run `titan prepare` again"
        )
    if options.split == "validation" and not shards.num_tokens:
        fix = (
            "prepare it again with --validation-fraction, or set validation.dataset"
            if prepared
            else f"raise data.validation_fraction ({options.validation_fraction}), or set validation.dataset"
        )
        raise DataError(f"'{shards.folder}' holds no document for validation; {fix}")
