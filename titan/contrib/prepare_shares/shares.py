"""Shards that several processes, on any hosts, write together: `titan prepare --share I N`. They have the bytes that one process writes.

Each share tokenizes a range of the files, and of the row groups of large Parquet files. Where a shard ends depends only on the
lengths of pieces, so the shares are joined once all are done: by the last one, or by the command without --share. Until then
the subfolder parts/ contains:

    plan.json       key of the shards, and the number of shares
    3/tokens.bin    tokens of share 3, of all splits, in the order of the documents
    3/pieces.bin    split, place and length of each piece
    3/done.json     written last: a share that was killed before starts again
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from titan.base.untrusted import read_json
from titan.data import DataError
from titan.data.cache import display, exclusive
from titan.data.reading import Document
from titan.data.shards import INDEX, PROGRESS, SPLITS, Index, require_key, write_index
from titan.data.sources import Documents
from titan.data.unread import Counts, total
from titan.data.writer import (
    EncodedPiece,
    Piece,
    Progress,
    SplitWriter,
    TokenizationSpec,
    encode_all,
    open_index,
    read_chunks,
)

# A Parquet file of more than this part of a share is divided at its row groups.
_LARGE = 1 / 8
_PIECE = np.dtype(
    "u1,i8,i8,u1,i8,i8"
)  # split, document, piece, whether it is the last, tokens, bytes
_ROWS = 2**16  # pieces in memory at once


class ShareRecord(BaseModel):
    """Contents of plan.json and, with what a share has written, of its done.json.

    Attributes:
        key: key of the index.
        shares: number of shares.
        unread: keys of rows that nothing read.
    """

    key: str
    shares: PositiveInt
    tokens: NonNegativeInt = 0
    pieces: NonNegativeInt = 0
    unread: Counts = {}


@dataclass(frozen=True)
class Shares:
    """Work on a folder of shards, divided into shares."""

    documents: Documents
    spec: TokenizationSpec
    folder: Path
    shard_tokens: int

    def write(self, share: int, shares: int, *, workers: int) -> str | None:
        """Tokenize a share, unless it is done.

        Args:
            share: number of the share, from 1.
            shares: number of all shares.
            workers: number of processes that tokenize.

        Returns:
            A line that says what is left to do, or None if all shares are done.

        Raises:
            DataError: the folder is of other text or options, or the text cannot be divided.
        """
        part = ShareRecord(key=self._key, shares=shares)
        with exclusive(self.folder):
            self._index()
            if self._is_complete:
                return None
            if not self._path("plan.json").is_file():
                self._path().mkdir(exist_ok=True)
                write_index(self._path("plan.json"), part)
        self._read("plan.json", shares)
        # A task that Slurm began twice waits here.
        with exclusive(self._path(f"{share}")):
            if share in self._left(shares) and not self._is_complete:
                self._tokenize(share, part, workers)
        left = [] if self._is_complete else self._left(shares)
        return f"share {share} of {shares} is done; left: {_listed(left)}" if left else None

    def join(self) -> Index:
        """Join the shares to shards, unless that is done.

        Raises:
            DataError: a share is missing, or a part is of other text or options.
        """
        with exclusive(self.folder):
            index = self._index()
            if not self._path("plan.json").is_file():
                return index  # another share has joined them
            shares = self._read("plan.json").shares
            if not self._is_complete:
                if left := self._left(shares):
                    raise DataError(
                        f"'{self.folder}' lacks shares {_listed(left)} of {shares}: run the command with --share {left[0]} "
                        f"{shares}, or delete {self._path()} to prepare without shares"
                    )
                # What a command without shares left has the same bytes, and is written again.
                (self.folder / PROGRESS).unlink(missing_ok=True)
                index = self._join(self._index(), shares)
            # Only what shares wrote.
            for share in range(1, shares + 1):
                shutil.rmtree(self._path(f"{share}"), ignore_errors=True)
            self._path("plan.json").unlink()
            with suppress(OSError):
                self._path().rmdir()
        return index

    @property
    def _key(self) -> str:
        return self.spec.key(self.documents, shard_tokens=self.shard_tokens)

    @property
    def _is_complete(self) -> bool:
        return (self.folder / INDEX).is_file()

    def _index(self) -> Index:
        return open_index(
            self.folder, self.documents, spec=self.spec, shard_tokens=self.shard_tokens
        )

    def _path(self, name: str = "") -> Path:
        return self.folder / "parts" / name

    def _left(self, shares: int) -> list[int]:
        numbers = range(1, shares + 1)
        return [n for n in numbers if not self._path(f"{n}/done.json").is_file()]

    def _read(self, name: str, shares: int | None = None) -> ShareRecord:
        """Return a file of parts/, after a check that it is of this text, these options and this number of shares."""
        part = read_json(self._path(name), ShareRecord)
        require_key(part.key, self._key, self.folder)
        if shares not in (None, part.shares):
            raise DataError(
                f"'{self._path(name)}' is of {part.shares} shares, not {shares}; delete {self._path()} to divide the text "
                "again"
            )
        return part

    def _range(self, share: int, shares: int) -> tuple[Documents, tuple[int, ...]]:
        """Return the documents of a share, and the place of the first."""
        documents = self.documents
        assert documents.places
        least = _LARGE * (documents.num_bytes or 0) / shares
        places = [*documents.places(int(least))]
        begins = np.cumsum([0, *(num_bytes for _, num_bytes in places)])
        # A place belongs to the share in which its first byte is.
        owners = begins[:-1] * shares // max(1, begins[-1])
        first, end = (int(owners.searchsorted(number)) for number in (share - 1, share))

        def read(*place: int) -> Iterator[Document]:
            # The place of the reader is that of the document that it has just yielded.
            return takewhile(
                lambda _: end == len(places) or documents.place() < places[end][0],
                documents.read(*place) if first < end else (),
            )

        before, after = int(begins[first]), int(begins[end])
        own = replace(
            documents,
            read=read,
            num_bytes=after - before,
            position=lambda: documents.position() - before,
        )
        return own, places[first][0] if first < end else ()

    def _tokenize(self, share: int, part: ShareRecord, workers: int) -> None:
        documents, place = self._range(share, part.shares)
        progress, folder = Progress(), self._path(f"{share}")
        chunks = read_chunks(
            documents,
            self.spec,
            dict.fromkeys(SPLITS, (0, 0)),
            progress,
            deque([[0, *place]]),
        )
        with (
            display(documents, title=f"share {share} of {part.shares}") as report,
            (folder / "tokens.bin").open("wb") as tokens,
            (folder / "pieces.bin").open("wb") as pieces,
        ):
            for chunk, encoded in encode_all(chunks, self.spec, workers=workers):
                rows = []
                for piece, one in zip(chunk, encoded, strict=True):
                    tokens.write(one.tokens.tobytes())
                    split, size = SPLITS.index(piece.split), len(one.tokens)
                    rows.append((split, *piece.place, piece.last, size, one.num_bytes))
                    part.tokens += size
                pieces.write(np.array(rows, _PIECE).tobytes())
                part.pieces += len(rows)
                part.unread = total([part.unread, *(one.unread for one in encoded)])
                progress.tokens, progress.num_bytes = part.tokens, documents.position()
                report(progress)
            # The bytes must be durable before done.json is.
            for file in (tokens, pieces):
                file.flush()
                os.fsync(file.fileno())
        write_index(folder / "done.json", part)

    def _join(self, index: Index, shares: int) -> Index:
        writers = {
            split: SplitWriter(self.folder, split=split, limit=self.shard_tokens, index=index)
            for split in SPLITS
        }
        parts = [self._read(f"{share}/done.json", shares) for share in range(1, shares + 1)]
        documents = 0
        for share, part in enumerate(parts, 1):
            for piece, encoded in self._pieces(share, part, first=documents):
                writers[piece.split].add(piece, encoded)
                documents = piece.number + 1
        for writer in writers.values():
            writer.close((documents, 0))
        index.unread = total(part.unread for part in parts)
        # Only now is the folder complete.
        write_index(self.folder / INDEX, index)
        return index

    def _pieces(
        self, share: int, part: ShareRecord, *, first: int
    ) -> Iterator[tuple[Piece, EncodedPiece]]:
        """Yield the pieces of a share, whose documents are numbered from `first` on."""
        tokens = _mapped(self._path(f"{share}/tokens.bin"), self.spec.dtype, part.tokens)
        table = _mapped(self._path(f"{share}/pieces.bin"), _PIECE, part.pieces)
        end = 0
        for begin in range(0, len(table), _ROWS):
            for split, document, index, last, size, num_bytes in table[
                begin : begin + _ROWS
            ].tolist():
                begin_token, end = end, end + size
                piece = Piece(first + document, index, SPLITS[split], "", bool(last))
                yield piece, EncodedPiece(tokens[begin_token:end], num_bytes, {})


def _mapped(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    size = file.stat().st_size
    if size != count * dtype.itemsize:
        raise DataError(
            f"{file} has {size} bytes, done.json says {count * dtype.itemsize}; delete {file.parent} and run its share again"
        )
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r").view(np.ndarray) if count else np.empty(0, dtype)


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))  # as sbatch --array takes them
