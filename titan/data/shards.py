"""Token shards: the one format in which finite text waits on disk, for prepared folders and for the cache.

A folder holds index.json and flat files of little-endian uint16 (uint32 above 65,536 ids): train-00000.bin ...
and, where documents were held out, validation-00000.bin ... Documents lie one after another, framed by
begin and end ids; a shard ends at a document's end. index.json is written last: a folder that has one is complete.
The reader maps the files, so that processes on one machine share the pages and opening costs nothing.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from titan.data.errors import DataError
from titan.data.packing import Framing

FORMAT = "titan-shards-1"
INDEX = "index.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its tokens, the documents they make up, and the bytes of text those were."""

    file: str
    tokens: int
    documents: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Index:
    """index.json. `key` names what the shards were made from, `bos_id` and `eos_id` what frames a document."""

    key: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    splits: dict[str, list[Shard]]
    format: str = FORMAT

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def total(self, split: str, field: str = "tokens") -> int:
        return sum(getattr(shard, field) for shard in self.splits.get(split, []))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write so that a reader sees the old content or the new, also after a crash."""
    temporary = temporary_name(path)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_index(folder: Path, index: Index) -> None:
    write_json(folder / INDEX, asdict(index) | {"dtype": index.dtype.name})


def read_index(folder: Path) -> Index:
    """index.json of a complete folder; raises DataError where there is none or it is not ours."""
    file = folder / INDEX
    if not file.is_file():
        unfinished = (folder / "progress.json").is_file()
        raise DataError(
            f"'{folder}' holds no token shards: "
            + (
                "`titan prepare` did not finish there; run it again"
                if unfinished
                else f"no {INDEX} in it"
            )
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content.pop("dtype")
        splits = {
            name: [Shard(**shard) for shard in shards]
            for name, shards in content.pop("splits").items()
        }
        index = Index(**content, splits=splits)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file}: not an index that `titan prepare` writes ({error})") from error
    if index.format != FORMAT:
        raise DataError(
            f"{file}: format '{index.format}', but this version reads '{FORMAT}'; prepare again"
        )
    return index


class TokenShards:
    """The tokens of one split as one long row, read from the mapped files."""

    def __init__(self, folder: Path, *, split: str) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self.framing = Framing(self.index.bos_id, self.index.eos_id)
        shards = self.index.splits.get(split, [])
        self._maps = [self._map(shard) for shard in shards]
        self._ends = np.cumsum([shard.tokens for shard in shards])
        self.num_tokens = int(self._ends[-1]) if shards else 0

    def _map(self, shard: Shard) -> np.ndarray:
        file, dtype = self.folder / shard.file, self.index.dtype
        expected = shard.tokens * dtype.itemsize
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DataError(
                f"{file} {found}, {INDEX} says {expected}; delete the folder and prepare again"
            )
        return np.memmap(file, dtype=dtype, mode="r")

    def read(self, start: int, *, count: int) -> np.ndarray:
        """`count` tokens from `start` as int64, across files where need be."""
        assert start >= 0 and start + count <= self.num_tokens, "read past the last token"
        number = int(np.searchsorted(self._ends, start, side="right"))
        result = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            begin = start + done - (int(self._ends[number - 1]) if number else 0)
            part = self._maps[number][begin : begin + count - done]
            result[done : done + len(part)] = part
            done += len(part)
            number += 1
        return result
