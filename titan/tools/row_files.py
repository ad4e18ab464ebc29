"""Readers of JSON Lines files of any length in bounded memory, even while they are written.

    Tail        yields the lines that were added since the last call
    LineFile    a Tail, and what is kept of its lines (a subclass says what); starts again when the file is cut or replaced
    RowFile     the LineFile of a metrics.jsonl: thinned rows, and the newest ones in full
    Thin        keeps, for each stretch of rows, the rows with the smallest and largest loss, the last validation and the
                last row. Stretches are joined in pairs when there are too many

Used by `titan watch` and `titan plot`. Imports no torch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from titan.base.rows import BLOCK_BYTES, MAX_LINE_BYTES, Row, number, parse
from titan.base.untrusted import open_regular

MAX_ROWS = 4000
_CHECK_BYTES = 64  # compared to notice that a file of the same inode was rewritten
_RECENT = 500  # rows that a page can fetch one by one between two polls


def run_names(paths: list[Path]) -> list[str]:
    """Return short names that distinguish the runs: folder names, or whole paths if two names are equal."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


@dataclass
class Tail:
    """Reader of the whole lines that are added to a file.

    Attributes:
        path: the file.
        last_bytes: distance of the start from the end of the file; None: read the whole file.
        generation: how often the file began again, because it was cut or replaced.
        num_long: lines that were dropped because of their length.
    """

    path: Path
    last_bytes: int | None = None
    generation: int = 0
    num_long: int = 0
    _inode: int = -1
    _offset: int = 0
    _check: bytes = b""
    _in_long: bool = False

    def read(self) -> Iterator[list[bytes]]:
        """Yield new lines, block by block.

        Raises:
            OSError: the file cannot be read.
        """
        with open_regular(self.path, within=self.path.parent) as file:
            status = os.fstat(file.fileno())
            # A resumed run cuts its file and appends other rows: the inode stays, the bytes before the offset do not.
            file.seek(max(self._offset - len(self._check), 0))
            if status.st_ino != self._inode or file.read(len(self._check)) != self._check:
                self._begin(status)
                file.seek(self._offset)
            yield from self._blocks(file)

    def _begin(self, status: os.stat_result) -> None:
        self._inode, self.generation, self.num_long = status.st_ino, self.generation + 1, 0
        left_out = status.st_size - (self.last_bytes or status.st_size)
        self._offset, self._check, self._in_long = max(left_out, 0), b"", left_out > 0

    def _blocks(self, file: IO[bytes]) -> Iterator[list[bytes]]:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            text = rest + block
            whole, newline, rest = text.rpartition(b"\n")
            # Drop a line without an end, so that memory stays bounded.
            if not newline and len(rest) > MAX_LINE_BYTES:
                self.num_long += not self._in_long
                self._advance(rest)
                self._in_long, rest = True, b""
            if newline:
                self._advance(whole + newline)
                lines = whole.split(b"\n")
                if self._in_long:
                    lines, self._in_long = lines[1:], False
                yield lines

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._check = (self._check + text[-_CHECK_BYTES:])[-_CHECK_BYTES:]


class Thin:
    """About `limit` rows of any number of them. While there are few, all are kept.

    With a limit of 8 there are two stretches. After 4 rows each has two of them; the fifth row joins both into one of four rows, and
    begins the second. A stretch keeps at most four rows: the ones with the least and largest loss, the last validation and the last row.
    """

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self.count = 0
        self._most = max(limit // 8 * 2, 2)  # even, so that all pairs are whole
        self._size = 1
        self._stretches: list[list[Row]] = []

    def add(self, row: Row) -> None:
        """Add a row at the end. Where there are too many stretches, neighbours become one."""
        if self.count % self._size == 0:
            if len(self._stretches) == self._most:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [_peaks(first + second) for first, second in pairs]
                self._size *= 2
            self._stretches.append([])
        self._stretches[-1] = _peaks([*self._stretches[-1], row])
        self.count += 1

    def rows(self) -> list[Row]:
        """Return the rows that were kept, in order."""
        return [row for stretch in self._stretches for row in stretch]


def _peaks(rows: list[Row]) -> list[Row]:
    """Return the rows of a stretch that are kept, in order."""
    losses = [(number(row.get("loss")), n) for n, row in enumerate(rows)]
    known = [each for each in losses if each[0] is not None]
    kept = {len(rows) - 1, *(end(known)[1] for end in (min, max) if known)}
    # An evaluation may come in another step than a validation.
    validations = [
        n
        for n, row in enumerate(rows)
        if any(key == "validation_loss" or key.startswith("eval/") for key in row)
    ]
    return [rows[n] for n in sorted(kept.union(validations[-1:]))]


@dataclass
class LineFile(Tail):
    """Keep something of the lines of a file that grows. A subclass says what, in `begin` and `take`.

    `problem` is a line for people, or "".
    """

    problem: str = ""
    num_bad: int = 0  # lines that are not what they should be

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all lines: the file begins again."""
        raise NotImplementedError

    def take(self, lines: list[bytes]) -> None:
        """Take in new lines."""
        raise NotImplementedError

    def update(self) -> None:
        """Read what is new."""
        self.problem = ""
        try:
            for lines in self.read():
                self.take(lines)
        except FileNotFoundError:
            pass  # not written yet
        except OSError as error:
            self.problem = f"{self.path.name}: {error.strerror or error}"
        if num_bad := self.num_bad + self.num_long:
            self.problem = f"{self.path.name}: {num_bad:,} lines are too long, or not readable"

    def _begin(self, status: os.stat_result) -> None:
        super()._begin(status)
        self.num_bad = 0
        self.begin()


class RowFile(LineFile):
    """Keep the rows of a metrics.jsonl that grows: all of them thinned, and the newest ones in full."""

    def __init__(self, path: Path, *, limit: int = MAX_ROWS) -> None:
        self._limit = limit
        super().__init__(path)

    def begin(self) -> None:
        self.thin = Thin(self._limit)
        self._recent = deque(maxlen=min(_RECENT, self._limit))

    def take(self, lines: list[bytes]) -> None:
        rows = [row for line in lines if (row := parse(line))]
        for row in rows:
            self.thin.add(row)
        self._recent.extend(rows)

    def since(self, count: int) -> list[Row] | None:
        """Return the rows after the first `count`, or None if not all of them are still there."""
        new = self.thin.count - count
        # A client that has no rows, or rows of another file, gets all of them.
        if not 0 < count <= self.thin.count or new > len(self._recent):
            return None
        return list(self._recent)[len(self._recent) - new :]
