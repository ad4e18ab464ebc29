"""Token shards: the one format in which finite text waits on disk, for prepared folders and for the cache.

A folder holds index.json and flat files of little-endian uint16 (uint32 above 65,536 ids): train-00000.bin ...
and, where documents were held out, validation-00000.bin ... Documents lie one after another, framed by
begin and end ids; a shard ends at the end of a document, or of a piece of a long one. index.json is written last: a
folder that has one is complete. Until then progress.json, of the same form, lists the shards there are.
The reader maps the files, so that processes on one machine share the pages and opening costs nothing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    ValidationError,
    computed_field,
    field_validator,
)

from titan.data import DataError
from titan.data.special_tokens import SpecialTokens

FORMAT = "titan-shards-1"
INDEX, PROGRESS = "index.json", "progress.json"
SPLITS = ("train", "validation")
_MAX_INDEX_BYTES = 2**28  # a million shards


class Shard(BaseModel):
    """One file: its tokens, the documents that end in it, the bytes of text those were, and where reading stood when it was
    closed: after so many documents of the source, of all splits, and so many pieces (pieces.py) of the next one.
    """

    file: Annotated[str, Field(pattern=r"^[a-z]+-[0-9]+\.bin$")]
    tokens: NonNegativeInt = 0
    documents: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    documents_read: NonNegativeInt = 0
    pieces_read: NonNegativeInt = 0


class Index(BaseModel):
    """index.json. `key` names what the shards were made from, `bos_id` and `eos_id` what frames a document."""

    format: Literal["titan-shards-1"] = FORMAT
    key: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    splits: dict[str, list[Shard]]

    @field_validator("splits")
    @classmethod
    def _has_every_split(cls, splits: dict[str, list[Shard]]) -> dict[str, list[Shard]]:
        if set(splits) != set(SPLITS):
            raise ValueError(f"expected {' and '.join(SPLITS)}")
        return splits

    @computed_field
    @property
    def dtype(self) -> str:
        return token_dtype(self.vocab_size).name

    def total(self, split: str, field: str = "tokens") -> int:
        return sum(getattr(shard, field) for shard in self.splits[split])


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def write_index(file: Path, index: Index) -> None:
    """Write so that a reader sees the old content or the new, also after a crash."""
    temporary = temporary_name(file)
    with temporary.open("w", encoding="utf-8") as opened:
        opened.write(index.model_dump_json(indent=1))
        opened.flush()
        os.fsync(opened.fileno())
    temporary.replace(file)


def read_index(file: Path) -> Index:
    """index.json of a complete folder, or progress.json; raises DataError where it is not ours or not there."""
    if not file.is_file():
        unfinished = file.with_name(PROGRESS).is_file()
        why = (
            "`titan prepare` did not finish there; run it again"
            if unfinished
            else f"no {file.name} in it"
        )
        raise DataError(f"'{file.parent}' holds no token shards: {why}")
    try:
        if file.stat().st_size > _MAX_INDEX_BYTES:
            raise DataError(f"{file}: too large for an index; prepare the folder again")
        return Index.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise DataError(
            f"{file}: not an index that this version of `titan prepare` writes ({where}: {first['msg']}); "
            "prepare the folder again"
        ) from error


class TokenShards:
    """The tokens of one split as one long row, read from the mapped files."""

    def __init__(self, folder: Path, *, split: str) -> None:
        self.folder, self._split = folder, split
        self.index = read_index(folder / INDEX)
        self.special_tokens = SpecialTokens(self.index.bos_id, self.index.eos_id)
        known = (self.index.vocab_size - 1, self.index.bos_id or 0, self.index.eos_id or 0)
        self._num_ids = max(known) + 1
        self._maps = [self._map(shard) for shard in self.index.splits[split] if shard.tokens]
        self._ends = np.cumsum([len(tokens) for tokens in self._maps], dtype=np.int64)
        self.num_tokens = self.index.total(split)

    def _map(self, shard: Shard) -> np.ndarray:
        file, dtype = self.folder / shard.file, token_dtype(self.index.vocab_size)
        expected = shard.tokens * dtype.itemsize
        found = file.stat().st_size if file.is_file() else 0
        if found != expected:
            raise DataError(
                f"{file} has {found} bytes, {INDEX} says {expected}; delete the folder and prepare again"
            )
        return np.memmap(file, dtype=dtype, mode="r")

    def read(self, start: int, *, count: int) -> np.ndarray:
        """`count` tokens from `start` as int64, across files where need be."""
        assert start >= 0 and start + count <= self.num_tokens, "read past the last token"
        number = int(np.searchsorted(self._ends, start, side="right"))
        begin = start - (int(self._ends[number - 1]) if number else 0)
        parts, missing = [], count
        while missing:
            parts.append(self._maps[number][begin : begin + missing])
            missing -= len(parts[-1])
            number, begin = number + 1, 0
        tokens = np.concatenate(parts, dtype=np.int64)
        if tokens.size and tokens.max() >= self._num_ids:
            raise DataError(
                f"the {self._split} shards in '{self.folder}' hold the id {tokens.max()}, but their vocabulary has "
                f"{self._num_ids}: they are damaged; delete the folder and prepare it again"
            )
        return tokens
