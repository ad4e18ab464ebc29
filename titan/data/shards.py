"""Token shards: the format of finite text on disk, both in prepared folders and in the cache.

A folder contains index.json and flat files of little-endian uint16 (uint32 above 65,536 ids): train-00000.bin ... and, if
documents were held out, validation-00000.bin ... Documents are stored one after another, framed by begin and end ids. A shard
ends at the end of a document, or at the end of a piece of a long document. index.json is written last, so a folder that has
it is complete. Until then progress.json, of the same form, lists the finished shards; an unfinished one ends in .part. The reader maps the files, so that processes on one machine share the pages, and opening costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    computed_field,
    field_validator,
)

from titan.base.run_writer import write_text_atomically
from titan.base.untrusted import InputError, read_json
from titan.data import DataError
from titan.data.special_tokens import KIND_SHIFT, START, SpecialTokens, without_kind
from titan.data.unread import Counts

FORMAT = "titan-shards-1"
INDEX, PROGRESS = "index.json", "progress.json"
SPLITS = ("train", "validation")
PADDING = -100  # titan.losses.loss.IGNORED, without torch
_MAX_INDEX_BYTES, _MAX_INDEX_VALUES = 2**28, 10**7  # enough for a million shards


class Shard(BaseModel):
    """One file of tokens.

    Attributes:
        file: name of the file.
        tokens: number of tokens in the file.
        documents: number of documents that end in the file.
        bytes: bytes of text that the tokens stand for.
        documents_read: documents of the source, of all splits, that had been read when the file was closed.
        pieces_read: pieces (reading.py) of the next document that had been read by then.
        unread: keys of its rows that nothing read.
    """

    file: Annotated[str, Field(pattern=r"^[a-z]+-[0-9]+\.bin$")]
    tokens: NonNegativeInt = 0
    documents: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    documents_read: NonNegativeInt = 0
    pieces_read: NonNegativeInt = 0
    unread: Counts = {}


class Index(BaseModel):
    """Contents of index.json, or of progress.json.

    Attributes:
        key: hash of everything that the shards depend on.
        bos_id: id that begins each document, or None.
        eos_id: id that ends each document, or None.
    """

    format: Literal["titan-shards-1"] = FORMAT
    key: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    kinds: bool = False
    """Whether ids have kinds, as the ids of conversations do (special_tokens.py)."""
    splits: dict[str, list[Shard]]
    unread: Counts = {}
    """Keys of rows and messages that nothing read, over all shards."""

    @field_validator("splits")
    @classmethod
    def _has_every_split(cls, splits: dict[str, list[Shard]]) -> dict[str, list[Shard]]:
        if set(splits) != set(SPLITS):
            raise ValueError(f"expected {' and '.join(SPLITS)}")
        return splits

    @computed_field
    @property
    def dtype(self) -> str:
        return token_dtype(self.vocab_size, kinds=self.kinds).name

    def total(self, split: str, field: str = "tokens") -> int:
        """Return the sum of a field over the shards of a split."""
        return sum(getattr(shard, field) for shard in self.splits[split])


@dataclass
class Progress:
    """Work done so far, for the display.

    Attributes:
        documents: documents read.
        num_bytes: bytes of the files read, as `Documents.position` counts them.
        tokens: tokens written.
    """

    documents: int = 0
    num_bytes: int = 0
    tokens: int = 0


def token_dtype(vocab_size: int, *, kinds: bool = False) -> np.dtype:
    """Return the smaller of uint16 and uint32 that can hold every id, together with its kind if ids have kinds."""
    return np.dtype("<u2" if vocab_size <= 2**16 and not kinds else "<u4")


def unfinished_name(path: Path) -> Path:
    """Return the name of a shard that is not full yet. One process at a time writes into a folder."""
    return path.with_name(f"{path.name}.part")


def write_index(file: Path, index: Index) -> None:
    """Write an index so that a reader sees the old content or the new content, even after a crash."""
    of_shards = {split: {"__all__": {"unread"}} for split in SPLITS}
    left_out = {"splits": of_shards}
    left_out = left_out if file.name == INDEX else None
    write_text_atomically(file, index.model_dump_json(indent=1, exclude=left_out))


def read_index(file: Path) -> Index:
    """Read index.json of a complete folder, or progress.json.

    Raises:
        DataError: the file is missing, or titan did not write it.
    """
    if not file.is_file():
        unfinished = file.with_name(PROGRESS).is_file()
        why = (
            "`titan prepare` did not finish there; run it again"
            if unfinished
            else f"no {file.name} in it"
        )
        raise DataError(f"'{file.parent}' holds no token shards: {why}")
    try:
        return read_json(file, Index, limit=_MAX_INDEX_BYTES, values=_MAX_INDEX_VALUES)
    except InputError as error:
        raise DataError(
            f"{error}; prepare the folder again with this version of titan, or use the one that wrote it"
        ) from error


def require_key(found: str, key: str, folder: Path) -> None:
    """Check that a folder has been written from the same text, with the same options."""
    if found != key:
        raise DataError(
            f"'{folder}' holds shards of other text, another tokenizer or other options; "
            "choose another folder or delete this one"
        )


class TokenShards:
    """Tokens of one split in mapped files, read as if they were one long file.

    Attributes:
        index: the contents of index.json.
        special_tokens: ids that begin and end a document.
        ends: int64[files]. Number of tokens up to the end of each file.
        num_tokens: number of tokens in all files.
    """

    _left_out = np.zeros((2, 0), dtype=np.int64)  # begins and ends of spans of tokens

    def __init__(self, folder: Path, *, split: str) -> None:
        self.folder, self.split = folder, split
        self.index = read_index(folder / INDEX)
        self.special_tokens = SpecialTokens(self.index.bos_id, self.index.eos_id)
        known = (self.index.vocab_size - 1, self.index.bos_id or 0, self.index.eos_id or 0)
        self._num_ids = max(known) + 1
        self._shards = [shard for shard in self.index.splits[split] if shard.tokens]
        self._maps = [self._map(shard) for shard in self._shards]
        self.ends = np.cumsum([len(tokens) for tokens in self._maps], dtype=np.int64)
        self.num_tokens = self.index.total(split)

    def _map(self, shard: Shard) -> np.ndarray:
        file, dtype = self.folder / shard.file, np.dtype(self.index.dtype)
        expected = shard.tokens * dtype.itemsize
        size = file.stat().st_size if file.is_file() else 0
        # The size reveals a file that was cut short, or that an older format left.
        if size != expected:
            raise DataError(
                f"{file} has {size} bytes, {INDEX} says {expected}; delete the folder and prepare again"
            )
        # A plain array, since slicing a memmap takes longer than copying a sample.
        return np.memmap(file, dtype=dtype, mode="r").view(np.ndarray)

    def read(self, start: int, *, count: int) -> np.ndarray:
        """Return `count` tokens from `start` on, as int64. They may come from several files."""
        assert start >= 0 and start + count <= self.num_tokens, "read past the last token"
        # The file that holds the first token, and how far into it that is.
        number = int(self.ends.searchsorted(start, side="right"))
        begin = start - self.begin_of(number)
        parts = [self._maps[number][begin : begin + count]]
        while (missing := count - sum(map(len, parts))) > 0:
            # The missing tokens are at the start of the next file.
            number += 1
            parts.append(self._maps[number][:missing])
        tokens = np.concatenate(parts, dtype=np.int64)
        begins, ends = self._left_out
        reached = slice(ends.searchsorted(start, "right"), begins.searchsorted(start + count))
        for begin, end in zip(begins[reached] - start, ends[reached] - start, strict=True):
            tokens[max(begin, 0) : end] = PADDING
        return tokens

    def leave_out(self, rows: Sequence[int]) -> None:
        """Read the tokens of documents as padding.

        Args:
            rows: numbers of the documents, as `documents` returns them.

        Raises:
            DataError: no token marks where documents begin, or there are fewer of them.
        """
        firsts = [0, *accumulate(shard.documents for shard in self._shards)]
        if max(rows) >= firsts[-1]:
            raise DataError(f"there is no row {max(rows)}; they end at {firsts[-1] - 1}")
        spans = []
        for file, (first, end) in enumerate(pairwise(firsts)):
            # A document may begin in one file and end in the next.
            numbers = [row - first for row in sorted({*rows}) if first <= row <= end]
            edges = np.append(self._begins(file), self.ends[file]) if numbers else ()
            spans += [edges[n : n + 2] for n in numbers if n + 1 < len(edges)]
        self._left_out = np.stack(spans, axis=1)

    def documents(self, start: int, *, count: int) -> np.ndarray:
        """Return the numbers of the documents of `count` tokens from `start` on, int64, counted from 0 over the split.

        Raises:
            DataError: no token marks where they begin.
        """
        places = np.arange(start, start + count)
        files = self.ends.searchsorted(places, side="right")
        parts = []
        for file in map(int, np.unique(files)):
            before = sum(shard.documents for shard in self._shards[:file]) - 1
            begins = self._begins(file)
            parts.append(before + begins.searchsorted(places[files == file], side="right"))
        return np.concatenate(parts)

    def _begins(self, number: int) -> np.ndarray:
        """Return where documents begin in a file. Its first token may continue one."""
        tokens, marks = self._maps[number][None], self.special_tokens
        if not (self.index.kinds or marks.marks_boundaries):
            raise DataError(
                f"no token marks the documents of '{self.folder}': set data.add_eos"
            )
        is_start = tokens >> KIND_SHIFT == START if self.index.kinds else marks.starts(tokens)
        begins = np.append(0, 1 + np.flatnonzero(is_start[0, 1:]))
        return self.begin_of(number) + begins

    def begin_of(self, number: int) -> int:
        """Return the number of tokens before a file."""
        return int(self.ends[number - 1]) if number else 0

    def tokens_of(self, number: int) -> np.ndarray:
        """Return the mapped tokens of a file."""
        return self._maps[number]

    def check(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens, after a check that the vocabulary has all of their ids.

        Raises:
            DataError: the vocabulary lacks an id, so the files are damaged.
        """
        # Such an id would index past the embedding. A GPU stops with an assertion that does not name the cause.
        ids = without_kind(tokens) if self.index.kinds else tokens
        if ids.max() >= self._num_ids:
            raise DataError(
                f"the {self.split} shards in '{self.folder}' hold the id {ids.max()}, but their vocabulary has "
                f"{self._num_ids}: they are damaged, or of another tokenizer; prepare them again"
            )
        return tokens
