"""Rows of a metrics.jsonl: reading them, and cutting them off after a step. Imports no torch."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from titan.base.run_writer import open_to_write
from titan.base.untrusted import InputError, open_regular

Row = dict[str, Any]
MAX_LINE_BYTES = 2**20
BLOCK_BYTES = 2**18


def parse(line: bytes, *, key: str = "step") -> Row | None:
    """Parse the row of a line; None if it is no object with the key."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and key in row else None


def number(value: Any) -> float | None:
    """Return the value if it is a number that a chart can show, otherwise None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 and not math.isnan(value) else None


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a metrics.jsonl. Lines that are no rows, such as a torn last one, are left out.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        rows = filter(None, map(parse, lines_of(path)))
        return [row for row in rows if type(row["step"]) is int]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of rows.

    Raises:
        OSError: the file cannot be read, or has a line that is too long for a row.
    """
    with open_regular(path, within=path.parent) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                raise OSError(errno.EFBIG, "a line is too long for a row")
            yield line


def cut_after(path: Path, *, step: int) -> Row | None:
    """Cut off the rows after a step and a torn last line, in place.

    If no row is kept, the file belonged to another run, or to a start that left no checkpoint. It
    is then moved to metrics.previous.jsonl, not deleted.

    Args:
        path: file of rows.
        step: last step to keep.

    Returns:
        The last row that is kept.
    """
    any_row = False
    # A run of weeks has a large file, and the row is near its end: read backwards.
    with os.fdopen(open_to_write(path, os.O_RDWR), "r+b") as file:
        for line, end in _lines_backwards(file):
            row = parse(line)
            if row is None or not isinstance(row["step"], int):
                continue
            any_row = True
            if row["step"] > step:
                continue
            file.truncate(end)
            if not line.endswith(b"\n"):  # the crash came between a row and its end
                file.seek(end)
                file.write(b"\n")
            return row
    if any_row:
        path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
    else:
        path.unlink()
    return None


def _lines_backwards(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield each line of a file and its end, the last line first. Lines too long for a row are left out."""
    position, rest = os.fstat(file.fileno()).st_size, b""
    while position:
        # Read one more block towards the start of the file.
        begin = max(position - BLOCK_BYTES, 0)
        file.seek(begin)
        text = file.read(position - begin) + rest
        position, rest = begin, b""
        if begin:  # the first line began before
            rest, newline, text = text.partition(b"\n")
            begin += len(rest + newline)
            rest += newline
            if len(rest) > MAX_LINE_BYTES:
                rest = b""
        end = begin + len(text)
        for line in reversed(text.splitlines(keepends=True)):
            yield line, end
            end -= len(line)
