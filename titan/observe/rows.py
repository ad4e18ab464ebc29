"""Read JSON Lines of any length, such as metrics.jsonl while it is written, in bounded memory; and cut one off after a step.

`Tail` reads on from where it stopped. `Thin` keeps of each stretch of rows those with its least and largest loss, its last
validation and its last row; stretches are joined in pairs as rows come in, so that there are never many. Which rows those are
is found without parsing the others. Used by `titan watch`, `titan plot` and the log of metrics. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from titan.untrusted import open_regular

Row = dict[str, Any]
MAX_ROWS = 4000
_MAX_LINE_BYTES = 2**20
_BLOCK_BYTES = 2**18
_CHECK_BYTES = 64
_RECENT = 500
_LOSS = re.compile(rb'"loss": (-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)[,}]')
_HEAD_BYTES = 64  # of a row, which hold its step and loss
_VALIDATION = b'"validation_loss"'


def parse(line: bytes, *, key: str = "step") -> Row | None:
    """Return the row of a line that has the key; None where it is something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and key in row else None


def number(value: Any) -> float | None:
    """Return a value that is a number of a size that a chart can show; None for all else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 and not math.isnan(value) else None


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a metrics.jsonl, without a torn one."""
    with open_regular(path, within=path.parent) as file:
        return [row for line in file if (row := parse(line))]


class Tail:
    """The whole lines of a file that grows. generation: changes where the file is another, or was cut."""

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """last_bytes: the first reading leaves out what lies before them."""
        self.path, self._last_bytes = path, last_bytes
        self.generation, self.num_long = 0, 0
        self._inode, self._offset, self._check, self._in_long = -1, 0, b"", False

    def read(self) -> Iterator[list[bytes]]:
        """Yield what is new, block by block. Raises OSError."""
        with open_regular(self.path, within=self.path.parent) as file:
            status = os.fstat(file.fileno())
            file.seek(max(self._offset - len(self._check), 0))
            if status.st_ino != self._inode or file.read(len(self._check)) != self._check:
                self._begin(status)
                file.seek(self._offset)
            yield from self._blocks(file)

    def _begin(self, status: os.stat_result) -> None:
        self._inode, self.generation, self.num_long = status.st_ino, self.generation + 1, 0
        left_out = status.st_size - (self._last_bytes or status.st_size)
        self._offset, self._check, self._in_long = max(left_out, 0), b"", left_out > 0

    def _blocks(self, file: IO[bytes]) -> Iterator[list[bytes]]:
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            text = rest + block
            whole, newline, rest = text.rpartition(b"\n")
            if not newline and len(rest) > _MAX_LINE_BYTES:
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


class _Kept(NamedTuple):
    loss: float
    number: int
    line: bytes


@dataclass
class _Stretch:
    """Consecutive rows; `kept`: by why they are."""

    count: int
    kept: dict[str, _Kept]

    def join(self, later: _Stretch) -> None:
        self.count += later.count
        for why, new in later.kept.items():
            old = self.kept.get(why)
            keep_old = old is not None and (
                (why == "least" and old.loss <= new.loss)
                or (why == "largest" and old.loss >= new.loss)
            )
            if not keep_old:
                self.kept[why] = new


def _stretch(lines: list[bytes], first: int) -> _Stretch:
    losses = _losses(lines)
    known = [n for n, loss in enumerate(losses) if loss == loss]
    by_loss = losses.__getitem__
    chosen = {}
    if known:
        chosen = {"least": min(known, key=by_loss), "largest": max(known, key=by_loss)}
    with_validation = (n for n in range(len(lines) - 1, -1, -1) if _VALIDATION in lines[n])
    if (n := next(with_validation, None)) is not None:
        chosen["validation"] = n
    chosen["last"] = len(lines) - 1
    kept = {why: _Kept(losses[n], first + n, lines[n]) for why, n in chosen.items()}
    return _Stretch(len(lines), kept)


def _losses(lines: list[bytes]) -> list[float]:
    """Return the losses of rows as titan writes them, without parsing the rows; NaN where there is none."""
    found = _LOSS.findall(b"\n".join([line[:_HEAD_BYTES] for line in lines]))
    if len(found) != len(lines):
        found = [(_LOSS.findall(line) or [b"nan"])[0] for line in lines]
    return [float(text) for text in found]


class Thin:
    """About `limit` rows of any number of them, all of the first ones."""

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self.count = 0
        self._most = max(limit // 8 * 2, 2)  # even, so that all pairs are whole
        self._size = 1
        self._stretches: list[_Stretch] = []
        self._parsed: dict[int, Row | None] = {}

    def add(self, lines: list[bytes]) -> None:
        begin = 0
        while begin < len(lines):
            last = self._stretches[-1] if self._stretches else None
            if last is None or last.count == self._size:
                if len(self._stretches) == self._most:
                    self._join_pairs()
                self._stretches.append(last := _Stretch(0, {}))
            part = lines[begin : begin + self._size - last.count]
            last.join(_stretch(part, self.count))
            begin, self.count = begin + len(part), self.count + len(part)

    def _join_pairs(self) -> None:
        for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=False):
            first.join(second)
        self._stretches = self._stretches[::2]
        self._size *= 2

    def rows(self) -> list[Row]:
        """Return the rows that were kept, in their order."""
        lines = {k.number: k.line for s in self._stretches for k in s.kept.values()}
        known = self._parsed
        self._parsed = {n: known[n] if n in known else parse(lines[n]) for n in sorted(lines)}
        return [row for row in self._parsed.values() if row is not None]


class RowFile:
    """The rows of a metrics.jsonl that grows, thinned, and the newest of them."""

    def __init__(self, path: Path, *, limit: int = MAX_ROWS) -> None:
        self.tail, self.problem = Tail(path), ""
        self._limit, self._generation = limit, 0
        self.thin, self._recent = Thin(limit), deque[bytes](maxlen=min(_RECENT, limit))

    def update(self) -> None:
        """Read what is new."""
        self.problem = ""
        try:
            for lines in self.tail.read():
                self._restart_if_new()
                self.thin.add(lines)
                self._recent.extend(lines)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.problem = f"{self.tail.path.name}: {error.strerror or error}"
        self._restart_if_new()
        if self.tail.num_long:
            self.problem = (
                f"{self.tail.path.name}: {self.tail.num_long:,} lines are too long for a row"
            )

    def _restart_if_new(self) -> None:
        if self.tail.generation != self._generation:
            self._generation = self.tail.generation
            self.thin = Thin(self._limit)
            self._recent.clear()

    def since(self, count: int) -> list[Row] | None:
        """Return the rows after the first `count`; None where they are no longer known one by one."""
        new = self.thin.count - count
        if not 0 < count <= self.thin.count or new > len(self._recent):
            return None
        lines: Iterable[bytes] = list(self._recent)[len(self._recent) - new :]
        return [row for line in lines if (row := parse(line)) is not None]


def cut_after(path: Path, *, step: int) -> Row | None:
    """Cut off the rows after `step` and a torn last line, in place; return the last row that is kept.

    Reads backwards from the end. Where no row is kept the file belonged to another run, or to a start that left no
    checkpoint: it is moved to metrics.previous.jsonl, not thrown away.
    """
    any_row = False
    with open_regular(path, within=path.parent) as file:
        for line, end in _lines_backwards(file):
            at = _step(line)
            any_row = any_row or at is not None
            if at is None or at > step or (row := parse(line)) is None:
                continue
            os.truncate(path, end)
            if not line.endswith(b"\n"):
                with path.open("ab") as appended:
                    appended.write(b"\n")
            return row
    if any_row:
        path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
    else:
        path.unlink()
    return None


def _step(line: bytes) -> int | None:
    """Return the step of a row, without parsing it where it is written as titan does."""
    start = b'{"step": '
    if line.startswith(start) and (comma := line.find(b",", 0, 40)) > 0:
        text = line[len(start) : comma]
        return int(text) if text.isdigit() else None
    row = parse(line) if line.startswith(b"{") else None
    return row["step"] if row and isinstance(row["step"], int) else None


def _lines_backwards(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from the last, and where each ends. Lines that are too long for a row are left out."""
    position, rest = os.fstat(file.fileno()).st_size, b""
    while position:
        begin = max(position - _BLOCK_BYTES, 0)
        file.seek(begin)
        text = file.read(position - begin) + rest
        position, rest = begin, b""
        if begin:  # the first line began before
            rest, newline, text = text.partition(b"\n")
            begin += len(rest + newline)
            rest += newline
            if len(rest) > _MAX_LINE_BYTES:
                rest = b""
        end = begin + len(text)
        for line in reversed(text.splitlines(keepends=True)):
            yield line, end
            end -= len(line)
