"""Series of samples from every kind of source, and blends of several sources.

A sample has seq_len + 1 tokens and begins seq_len tokens after the sample before it, so that each token is predicted once an
epoch. Finite text is in shards (shard_samples.py, or best_fit.py for whole documents). A blend computes the number that each
sample has in its source (order.Blend).

`build_samples` makes the samples from source sections, and loader.py reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from titan.config import schema as s
from titan.data import DataError
from titan.data.base import SOURCE_SHIFT, DatasetPhase, Samples, Source, State
from titan.data.cache import cached_shards
from titan.data.conversations import conversations
from titan.data.order import Blend, derive_key
from titan.data.shard_samples import SampleOptions, ShardSamples, open_shards
from titan.data.shards import TokenShards
from titan.data.sources import TextStream, open_documents, source_names
from titan.data.special_tokens import SpecialTokens
from titan.data.streams import StreamSamples
from titan.data.unread import unread_line
from titan.data.writer import TokenizationSpec


class SyntheticSamples(Source):
    """Uniformly random ids without documents. Each sample has its own generator."""

    special_tokens = SpecialTokens(None, None)

    def __init__(self, *, vocab_size: int, seq_len: int, key: int) -> None:
        self._vocab_size, self._seq_len, self._key = vocab_size, seq_len, key

    def get(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> np.ndarray:
        # The generator depends on the number, so that any rank can make any sample without the earlier ones.
        generator = np.random.Generator(np.random.Philox(key=derive_key(self._key, index)))
        return generator.integers(self._vocab_size, size=self._seq_len + 1)


class BlendSamples(Samples):
    """Blend of several sources in proportion to their weights."""

    def __init__(
        self, parts: Sequence[Source], *, weights: list[float], key: int, seq_len: int
    ) -> None:
        self._parts, self._key = parts, key
        self.unread = [line for part in parts for line in part.unread]
        self.begin(
            DatasetPhase(first=0, tokens=[0] * len(parts), seq_len=seq_len, weights=weights)
        )
        # Synthetic ids have no marks. All sources of text have the same marks.
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

    def part(self) -> DatasetPhase:
        return self._part

    def begin(self, part: DatasetPhase) -> None:
        self._part, self._blend = part, Blend(part.weights, key=self._key)
        for source in self._parts:
            source.resize(part.seq_len)
        # Number of each source's first sample with these settings.
        self._starts: Any = np.array([-(-tokens // part.seq_len) for tokens in part.tokens])

    def tokens_after(self, count: int, *, whole: bool) -> list[int]:
        tokens = ((self._starts + self._blend.consumed(count)) * self._part.seq_len).tolist()
        pairs = zip(self._parts, tokens, strict=True)
        return [source.round_up(number) if whole else number for source, number in pairs]

    def seek(self, position: int, *, bookmark: Any = None) -> None:
        # The bookmark of a single source, outside of a blend, has no list.
        marks = (bookmark or {}).get("parts", [bookmark])
        if len(marks) != len(self._parts):
            marks = [None] * len(self._parts)
        # How many samples of each source come before this position of the blend.
        numbers = (self._starts + self._blend.consumed(position)).tolist()
        for part, number, mark in zip(self._parts, numbers, marks, strict=True):
            part.seek(number, bookmark=mark)

    def bookmark(self) -> State | None:
        marks = [part.bookmark() for part in self._parts]
        return {"parts": marks} if any(marks) else None

    def sources(self, indices: np.ndarray) -> np.ndarray | None:
        if len(self._parts) == 1:
            return None
        return np.array([self._blend.locate(int(index))[0] for index in indices])

    def get(self, indices: np.ndarray) -> np.ndarray:
        return self._gather(indices, lambda source, numbers: self._parts[source].get(numbers))

    def documents(self, indices: np.ndarray) -> np.ndarray:
        def numbered(source: int, numbers: np.ndarray) -> np.ndarray:
            found = self._parts[source].documents(numbers)
            return np.where(found < 0, found, found + (source << SOURCE_SHIFT))

        return self._gather(indices, numbered)

    def _gather(
        self, indices: np.ndarray, read: Callable[[int, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        sources, places = np.array([self._blend.locate(int(index)) for index in indices]).T
        # One call for each source, with all of its samples.
        rows: dict[int, np.ndarray] = {}
        for source in range(len(self._parts)):
            if len(here := np.flatnonzero(sources == source)):
                numbers = places[here] + self._starts[source]
                rows.update(zip(here.tolist(), read(source, numbers), strict=True))
        return np.stack([rows[slot] for slot in range(len(indices))])


def build_samples(sources: Sequence[s.Section], *, options: SampleOptions) -> Samples:
    """Build the samples of one source, or the blend of several sources by their weights.

    Args:
        sources: the sections of the sources.
        options: options that all sources share.

    Raises:
        DataError: a source is unusable, or does not fit the job.
    """
    # The number gives two sources of equal text different orders.
    parts = [_open_source(source, number, options) for number, source in enumerate(sources)]
    if options.split == "train" and options.data.skip:
        _leave_out(options.data.skip, dict(zip(source_names(sources), parts, strict=True)))
    if len(parts) == 1 and not options.longest:
        return parts[0]
    weights = [s.source_of(source).weight for source in sources]
    key = derive_key(options.seed, options.split, "blend")
    return BlendSamples(parts, weights=weights, key=key, seq_len=options.seq_len)


def _leave_out(entries: Sequence[str], sources: Mapping[str, Source]) -> None:
    """Leave documents, as SOURCE:ROW, out of their sources."""
    rows: dict[str, list[int]] = {}
    for name, _, row in (entry.rpartition(":") for entry in entries):
        rows.setdefault(name, []).append(int(row))
    for name, numbers in rows.items():
        if name not in sources:
            raise DataError(f"data.skip names '{name}'; the sources are {', '.join(sources)}")
        try:
            sources[name].leave_out(numbers)
        except DataError as error:
            raise DataError(f"data.skip names rows of '{name}': {error}") from None


def _open_source(section: s.Section, number: int, options: SampleOptions) -> Source:
    data = options.data
    # The key decides the order of this source. It changes with the seed, the split and the place in the list.
    key = derive_key(options.seed, options.split, number)
    if isinstance(section, s.SyntheticSource):
        vocab_size = options.tokenizer.vocab_size
        return SyntheticSamples(vocab_size=vocab_size, seq_len=options.seq_len, key=key)
    if isinstance(section, s.TokenFiles):
        shards = section.open(options) or open_shards(section.path, options)
        return _shard_samples(shards, options, key=key, name=f"the shards in '{section.path}'")
    if options.split == "validation" and not data.validation_fraction:
        raise DataError(
            "validation has no text: set data.validation_fraction (0.01 holds out every hundredth document) "
            "or validation.dataset"
        )
    spec = spec_of(section, options)
    if isinstance(section, s.HuggingFaceSource) and section.streaming:
        return _stream_samples(section, spec, options, key=key)
    # All other text is finite: one process tokenizes it, and all processes map its shards.
    documents = open_documents(section)
    folder = cached_shards(documents, spec=spec, cache_folder=data.cache_folder)
    shards = TokenShards(folder, split=options.split)
    samples = _shard_samples(shards, options, key=key, name=documents.name)
    if documents.unread:
        samples.unread = [*samples.unread, documents.name]
    return samples


def _stream_samples(
    section: s.HuggingFaceSource, spec: TokenizationSpec, options: SampleOptions, *, key: int
) -> StreamSamples:
    """Return the samples of this rank's part of a stream."""
    tokenizer, seq_len, data = options.tokenizer, options.seq_len, options.data
    if data.packing == "best_fit":
        raise DataError(
            f"data.packing = 'best_fit' packs finite text, and {section.path} is a stream; set streaming = false"
        )
    key = derive_key(key, "rank", options.rank, options.world)
    depends_on = (
        str(spec.special_tokens),
        seq_len,
        str(data.validation_fraction),
        data.shuffle,
    )
    stream = TextStream(section, rank=options.rank, world=options.world)
    samples = StreamSamples(
        stream,
        tokenizer=tokenizer,
        special_tokens=spec.special_tokens,
        seq_len=seq_len,
        shuffle_buffer=section.shuffle_buffer if data.shuffle else 0,
        seed=key,
        keep=lambda text: spec.split_of(text) == options.split,
        identity=derive_key(key, repr(section), tokenizer.fingerprint, *depends_on),
    )
    samples.unread = stream.unread() if options.rank == 0 else ()
    return samples


def spec_of(section: s.Section, options: SampleOptions) -> TokenizationSpec:
    """Return the settings by which the documents of a source become tokens."""
    if not s.reads_chats(section):
        return options.spec
    template = conversations().template_of(options.tokenizer)
    return replace(options.spec, template=template)


def _shard_samples(
    shards: TokenShards, options: SampleOptions, *, key: int, name: str
) -> ShardSamples:
    """Return the samples of a source's shards, cut or of whole documents."""
    has_chats = shards.index.kinds  # conversations are never cut
    if options.data.packing == "cut" and not has_chats:
        samples = ShardSamples(shards, options, key=key, name=name)
    else:
        if options.num_lengths > 1:
            raise DataError(
                f"{name}: rows of whole documents have one length; remove seq_len from [[phase]]"
            )
        if has_chats and not options.data.document_mask:
            raise DataError(
                f"{name}: conversations share sequences; set data.document_mask = true"
            )
        from titan.data.best_fit import BestFitSamples

        samples = BestFitSamples(shards, options, key=key, name=name)
    if line := unread_line(shards.index.unread):
        samples.unread = [f"{name}: {line}"]
    return samples
