"""Read documents from files: text, JSON Lines and Parquet, in bounded memory whatever a file holds.

Each reader yields the documents of one file and raises `DataError`, which names the file and where it can the line. An
empty text and a null are no document, in every format. sources.py decides which files are read by which reader.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from titan.data import DataError, require

PIECE_CHARS = 2**17
_WINDOW = 2**14  # at the end of a piece, in which a good place for the cut is looked for
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_BLOCK_BYTES = 2**18
_MAX_LINE_BYTES = 2**26
_LARGE_LINE_BYTES, _MAX_STRUCTURE_BYTES = 2**20, 2**20
_BATCH_BYTES = 2**23
# Text shrinks 3 to 20 times, deflate's limit is 1032: what lies between is made to fill a disk or a memory.
_MAX_RATIO, _RATIO_FROM_BYTES = 200, 2**24
_SET_KEY = "set text_key; for titan prepare and tokenizer, --text-key"
_NO_TEXT = {int: "a number", float: "a number", bool: "true or false"}
_NO_TEXT |= {list: "a list", dict: "an object", bytes: "binary"}
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeError, SyntaxError)


@dataclass(frozen=True)
class LongText:
    """A document that is read in pieces, from its beginning each time `read` is called."""

    read: Callable[[], Iterator[str]]


Document = str | LongText


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the text of the blocks in pieces of at most PIECE_CHARS characters."""
    rest = ""
    for block in blocks:
        rest += block
        begin = 0
        while len(rest) - begin > PIECE_CHARS:
            end = begin + PIECE_CHARS
            for cut in _CUT.finditer(rest, end - _WINDOW, end + 1):
                end = cut.end()  # the last one counts
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def pieces_of(document: str | LongText) -> Iterator[str]:
    """Yield the pieces of a document."""
    return document.read() if isinstance(document, LongText) else pieces([document])


@dataclass
class Meter:
    """How far reading has come, in bytes of the files; for the display."""

    before: int = 0
    here: int = 0

    @property
    def num_bytes(self) -> int:
        return self.before + self.here


Reader = Callable[..., Iterator[Document | None]]


def read_files(
    files: Sequence[Path], read: Reader, meter: Meter, **options: str
) -> Iterator[Document]:
    """Yield the documents of the files, each read by `read(file, meter, **options)`."""
    meter.before = meter.here = 0
    for file in files:
        try:
            for document in read(file, meter, **options):
                if document:
                    yield document
        except _UNREADABLE as error:
            raise _unreadable(str(file), error) from error
        meter.before, meter.here = meter.before + file.stat().st_size, 0


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: cannot be read ({error}); replace the file or leave it out")


class _Unpacked(io.RawIOBase):
    """The bytes of a file, of a .gz file those that were packed."""

    def __init__(self, file: Path, meter: Meter) -> None:
        self._file, self._meter, self._num_bytes = file, meter, 0
        self._packed = file.open("rb")
        is_packed = file.suffix == ".gz"
        self._content: Any = gzip.GzipFile(fileobj=self._packed) if is_packed else self._packed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer)
        self._num_bytes += count
        self._meter.here = self._packed.tell()
        if self._num_bytes > max(_RATIO_FROM_BYTES, _MAX_RATIO * self._meter.here):
            raise DataError(
                f"{self._file}: its first {self._meter.here:,} bytes unpack to {self._num_bytes:,}, which no text does; "
                "replace the file or leave it out"
            )
        return count

    def close(self) -> None:
        self._packed.close()
        super().close()


def _open(file: Path, meter: Meter) -> BinaryIO:
    return io.BufferedReader(_Unpacked(file, meter), _BLOCK_BYTES)  # pyright: ignore[reportReturnType]


def read_python(file: Path, meter: Meter) -> Iterator[str]:
    """Yield a Python source file as one document."""
    with tokenize.open(file) as lines:  # honours the file's coding line
        yield lines.read()
    meter.here = file.stat().st_size


def read_text(file: Path, meter: Meter) -> Iterator[Document]:
    """Yield a text file as one document."""
    reading = pieces(_decoded(file, meter))
    first = next(reading, "")
    is_short = next(reading, None) is None
    yield first if is_short else LongText(lambda: pieces(_decoded(file, meter)))


def _decoded(file: Path, meter: Meter) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks; every line ends with a line feed."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, line, block = 0, 1, b" "
    with _open(file, meter) as content:
        while block:
            pending = decoder.getstate()[0]
            try:
                block = content.read(_BLOCK_BYTES)
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += (pending + block)[: error.start].count(b"\n")
                where = offset - len(pending) + error.start
                raise DataError(
                    f"{file}:{line}: not UTF-8 at byte {where}; convert it (iconv) or leave it out"
                ) from error
            except _UNREADABLE as error:
                raise _unreadable(f"{file}:{line}", error) from error
            offset, line = offset + len(block), line + block.count(b"\n")
            yield newlines.decode(text, final=not block)


def read_jsonl(file: Path, meter: Meter, key: str) -> Iterator[str]:
    """Yield the text under `key` of each line."""
    number = 0
    with _open(file, meter) as lines:
        while True:
            number += 1
            try:
                line = lines.readline(_MAX_LINE_BYTES + 1)
            except _UNREADABLE as error:
                raise _unreadable(f"{file}:{number}", error) from error
            if not line:
                return
            if not line.isspace():
                yield field(_row(line, where=f"{file}:{number}"), key, where=f"{file}:{number}")


def _row(line: bytes, *, where: str) -> Any:
    """Return the value that a line of JSON spells, which takes at most a few times the memory of the line."""
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{where}: a line of more than {_MAX_LINE_BYTES >> 20} MiB; give a text of that length a .txt file"
        )
    if len(line) > _LARGE_LINE_BYTES:
        # Two bytes of "[]" become an object of 56, so a long line may be text, but not structure.
        plain = line.replace(b"\\\\", b"").replace(b'\\"', b"")
        if len(re.sub(rb'"[^"]*"?', b"", plain)) > _MAX_STRUCTURE_BYTES:
            raise DataError(f"{where}: a long line, and not for its text; is it JSON Lines?")
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not a line of JSON: {error}") from error
    except RecursionError:
        raise DataError(
            f"{where}: not a line of JSON that can be read: too deeply nested"
        ) from None


def field(row: Any, key: str, *, where: str) -> str:
    """Return the text of a row's field; raises DataError where it has none."""
    fields = row if isinstance(row, dict) else {}
    if key not in fields:
        names = sorted(fields)
        listed = ", ".join(name[:40] for name in names[:10]) or "none"
        more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
        raise DataError(
            f"{where}: no text under '{key}'; its fields are {listed}{more} ({_SET_KEY})"
        )
    return _text(fields[key], key, where=where)


def _text(text: Any, key: str, *, where: str) -> str:
    """Return the text of a field, "" for null; half surrogate pairs, which JSON can spell but UTF-8 cannot, become U+FFFD."""
    if text is None:
        return ""
    if not isinstance(text, str):
        kind = _NO_TEXT.get(type(text), type(text).__name__)
        raise DataError(f"{where}: '{key}' is {kind}, not text ({_SET_KEY})")
    if re.search("[\ud800-\udfff]", text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_parquet(file: Path, meter: Meter, key: str) -> Iterator[str]:
    """Yield the text of each row."""
    parquet = require("pyarrow.parquet", purpose=f"reading {file}")
    try:
        table = parquet.ParquetFile(file, page_checksum_verification=True)
    except Exception as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from error
    with table:
        names = table.schema_arrow.names
        if key not in names:
            listed = ", ".join(name[:40] for name in names[:20])
            raise DataError(f"{file}: no column '{key}'; its columns are {listed} ({_SET_KEY})")
        size = file.stat().st_size
        for number in range(table.num_row_groups):
            where = f"{file}, row group {number}"
            batches = table.iter_batches(
                batch_size=_rows_at_a_time(table.metadata.row_group(number)),
                row_groups=[number],
                columns=[key],
            )
            while (texts := _next_batch(batches, where=where)) is not None:
                yield from (_text(text, key, where=where) for text in texts)
            meter.here = size * (number + 1) // table.num_row_groups


def _rows_at_a_time(group: Any) -> int:
    """Return how many rows to read at once so that they take a few megabytes."""
    each = max(group.total_byte_size // max(group.num_rows, 1), 1)
    return max(1, min(1024, _BATCH_BYTES // each))


def _next_batch(batches: Iterator[Any], *, where: str) -> list[Any] | None:
    """Return the texts of the next batch; None after the last."""
    try:
        batch = next(batches, None)
        return None if batch is None else batch.column(0).to_pylist()
    except Exception as error:  # of many kinds: pages that are cut, flipped or packed wrongly
        raise DataError(
            f"{where}: cannot be read ({error}); replace the file or leave it out"
        ) from error
