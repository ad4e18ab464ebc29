"""Shards that many processes, on any hosts, write together, with the bytes that one process writes (writer.py).

The text is divided into units: files that follow each other, or row groups of a large Parquet file. Any process tokenizes any
unit. Where a shard ends depends only on the lengths of pieces, which are known once all units are tokenized. Then any process
copies the tokens of any shard together. Until the folder is complete, its subfolder parts/ contains:

    plan.json         the units
    7.train.bin       tokens of unit 7 for the split
    7.unread          keys of the unit's rows that nothing read
    7.npy             pieces of unit 7. It is written last, so a unit that has it is complete
    train-00000.bin   a complete shard

Each file gets its name when it is complete, and always has the same bytes. So a process may die anywhere, and two processes may
do the same work. hosts.py decides who does what.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from titan.base.untrusted import read_json
from titan.data import DataError, writer
from titan.data.cache import exclusive
from titan.data.shards import INDEX, PROGRESS, SPLITS, Index, Shard, temporary_name, write_index
from titan.data.sources import Documents
from titan.data.unread import Counts, total
from titan.data.writer import Progress, TokenizationSpec

# A unit of this many bytes takes seconds, far longer than it takes to begin with it. Large text has larger units, but no more
# than the second number, so that a folder does not get millions of files.
UNIT_BYTES, _MAX_UNITS = 2**24, 2**16
_PIECE = np.dtype("u1,i8,i8,u1,i8,i8")
_PIECE.names = ("split", "document", "piece", "last", "tokens", "bytes")

Run = Callable[[str, Iterable[Any]], Iterator[Any]]
"""Calls a method of `Parts` with each item, in any processes. Yields the results in any order."""


class UnitPlan(BaseModel):
    """Contents of plan.json.

    Attributes:
        key: key of the index.
        places: where each unit begins (`Documents.place`).
        sizes: bytes of the files of each unit, nearly.
    """

    key: str
    places: list[list[NonNegativeInt]] = []
    sizes: list[NonNegativeInt] = []


@dataclass
class Parts:
    """Work on a folder of shards that several processes share."""

    documents: Documents
    spec: TokenizationSpec
    folder: Path
    shard_tokens: int

    def __post_init__(self) -> None:
        self.plan = UnitPlan(key=self.spec.key(self.documents, shard_tokens=self.shard_tokens))

    def divide(self) -> None:
        """Divide the work, unless an earlier command has divided it.

        Raises:
            DataError: the folder has shards of other text or options, or the text cannot be divided.
        """
        with exclusive(self.folder):
            self._index()
            if not self.is_complete and not self.path("plan.json").is_file():
                assert self.documents.places
                least = max(UNIT_BYTES, (self.documents.num_bytes or 0) // _MAX_UNITS)
                for place, num_bytes in self.documents.places(least):
                    if not self.plan.sizes or self.plan.sizes[-1] >= least:
                        self.plan.places.append([*place])
                        self.plan.sizes.append(0)
                    self.plan.sizes[-1] += num_bytes
                self.path().mkdir(exist_ok=True)
                write_index(self.path("plan.json"), self.plan)
        self.check()

    def check(self, _: object = None) -> None:
        """Read the plan, and check that this host sees the folder and the text."""
        if not self.is_complete:
            if not (file := self.path("plan.json")).is_file():
                raise DataError(
                    f"no {file} on this host; all hosts must share the disk of --output"
                )
            plan = read_json(file, UnitPlan, limit=2**28, values=10**7)
            writer.require_key(plan.key, [self.plan.key], self.folder)
            self.plan = plan
            self.documents.try_first()

    @property
    def is_complete(self) -> bool:
        """Return whether the folder has all of its shards."""
        return (self.folder / INDEX).is_file()

    def _index(self) -> Index:
        how: dict[str, Any] = {"spec": self.spec, "shard_tokens": self.shard_tokens}
        return writer.open_index(self.folder, self.documents, **how)

    def path(self, name: str = "") -> Path:
        """Return the path of a file in parts/."""
        return self.folder / "parts" / name

    def missing(self) -> list[int]:
        """Return the units that are not tokenized yet."""
        done = {file.name for file in self.path().glob("*.npy")}
        return [unit for unit in range(len(self.plan.sizes)) if f"{unit}.npy" not in done]

    def write(
        self, run: Run, report: Callable[[Progress], None], *, share: int = 0, shares: int = 1
    ) -> Index | None:
        """Write what is missing, with `run`. Return the index of the folder, or None if units of other shares are missing."""
        units, missing = {*range(len(self.plan.sizes))[share::shares]}, {*self.missing()}
        if not self.is_complete:
            before = sum(self.plan.sizes[unit] for unit in units - missing)
            total = Progress(num_bytes=before, bytes_before=before)
            for done in run("write_unit", sorted(units & missing)):
                total.documents += done.documents
                total.tokens += done.tokens
                total.num_bytes += done.num_bytes
                report(total)
            if not self.is_complete and self.missing():
                return None
        with exclusive(self.folder):
            if not self.is_complete:
                self._join(run)
            # Delete what a command without other hosts left, too.
            for left in (self.folder / PROGRESS, *self.folder.glob("*.part")):
                left.unlink(missing_ok=True)
            shutil.rmtree(self.path(), ignore_errors=True)
        return self._index()

    def write_unit(self, number: int) -> Progress:
        """Tokenize a unit. Return what has been done."""
        begin, *after = (tuple(place) for place in self.plan.places[number : number + 2])
        documents, progress, pieces, unread = self.documents, Progress(), [], []

        def read(*place: int) -> Iterator[Any]:
            # The place of the reader is that of the document that it has just yielded.
            return takewhile(
                lambda _: not after or documents.place() < after[0], documents.read(*place)
            )

        unit, places = replace(documents, read=read), deque([[0, *begin]])
        done: dict[str, writer.ReadPosition] = dict.fromkeys(SPLITS, (0, 0))
        with ExitStack() as stack:
            # The last file is complete last: the others get their names first.
            table = stack.enter_context(_published(self.path(f"{number}.npy")))
            paths = {split: self.path(f"{number}.{split}.bin") for split in SPLITS}
            files = {
                name: stack.enter_context(_published(path)) for name, path in paths.items()
            }
            for chunk in writer.read_chunks(unit, self.spec, done, progress, places):
                for piece, one in zip(
                    chunk, writer.encode_documents(chunk, self.spec), strict=True
                ):
                    files[piece.split].write(one.tokens.tobytes())
                    split, size = SPLITS.index(piece.split), len(one.tokens)
                    pieces.append((split, *piece.place, piece.last, size, one.num_bytes))
                    progress.tokens += size
                    unread.append(one.unread)
            stack.enter_context(_published(self.path(f"{number}.unread"))).write(
                json.dumps(total(unread)).encode()
            )
            np.save(table, np.array(pieces, _PIECE))
        progress.num_bytes = self.plan.sizes[number]
        return progress

    def _join(self, run: Run) -> None:
        index = self._index()
        found = {split: [*self._shards(split)] for split in SPLITS}
        deque(run("write_shard", chain(*found.values())), maxlen=0)
        for split, shards in found.items():
            index.splits[split] = [shard for shard, _ in shards]
            for shard in index.splits[split]:
                self.path(shard.file).replace(self.folder / shard.file)
        units = range(len(self.plan.sizes))
        index.unread = total(read_json(self.path(f"{unit}.unread"), Counts) for unit in units)
        write_index(self.folder / INDEX, index)

    def _shards(self, split: str) -> Iterator[tuple[Shard, list[tuple[int, int, int]]]]:
        """Yield the shards of a split with their tokens (unit, begin, end). They end where writer.py's _SplitWriter ends them."""
        shard, ranges, count, documents = Shard(file=f"{split}-00000.bin"), [], 1, 0
        for unit in range(len(self.plan.sizes)):
            pieces = np.load(self.path(f"{unit}.npy"), allow_pickle=False)
            own = pieces[pieces["split"] == SPLITS.index(split)]
            ends, at = np.concatenate([[0], own["tokens"].cumsum()]), 0
            while at < len(own):
                room = self.shard_tokens - shard.tokens
                until = int(ends.searchsorted(ends[at] + room, side="right")) - 1
                # A piece that is longer than a shard gets a shard to itself.
                if (until := max(until, at if ranges else at + 1)) > at:
                    ranges.append((unit, int(ends[at]), int(ends[until])))
                    shard.tokens += int(ends[until] - ends[at])
                    shard.documents += int(own["last"][at:until].sum())
                    shard.bytes += int(own["bytes"][at:until].sum())
                    at = until
                if at < len(own):  # the next piece has no room
                    shard.documents_read = documents + int(own["document"][at])
                    shard.pieces_read = int(own["piece"][at])
                    yield shard, ranges
                    shard, ranges = Shard(file=f"{split}-{count:05d}.bin"), []
                    count += 1
            documents += int(pieces["document"].max(initial=-1)) + 1
        if ranges:
            shard.documents_read = documents
            yield shard, ranges

    def write_shard(self, work: tuple[Shard, list[tuple[int, int, int]]]) -> None:
        """Copy a shard together from the tokens of units: (unit, begin, end)."""
        shard, ranges = work
        if not self.path(shard.file).is_file():
            with _published(self.path(shard.file)) as file:
                for unit, begin, end in ranges:
                    name = f"{unit}.{shard.file.split('-')[0]}.bin"
                    if begin < end:  # an empty file cannot be mapped
                        file.write(
                            np.memmap(self.path(name), self.spec.dtype, "r")[begin:end].data
                        )


@contextmanager
def _published(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name once its bytes are on disk."""
    with temporary_name(path).open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary_name(path).replace(path)
