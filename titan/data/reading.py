"""Readers of documents from files (text, JSON Lines, CSV, Parquet). Memory is bounded, whatever a file contains.

Each reader yields the documents of one file. All functions here raise `DataError` for a file or row that is unusable. It
names the file and, if possible, the line. An empty text and a null are not documents in any format. sources.py selects the
reader of a file.

`pieces` cuts long documents, so that no document needs to fit in memory and several workers can share one document. A document
of at most `PIECE_CHARS` characters is one piece. A longer document is cut between a word and the space before the next word, or
after a line. The patterns of GPT-2's and Llama 3's tokenizers cut there too, so the tokens stay the same. Only text without
spaces and lines is cut elsewhere. The cuts depend on the text alone.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from titan.base.untrusted import Unpacked
from titan.data import DataError, require
from titan.data.files import ending_of
from titan.data.rows import (
    SET_KEY,
    Digits,
    LongText,
    NoText,
    TakeRow,
    field,
    from_parquet,
    plain_text,
    row_text,
)

# Characters of a piece: small enough to hand to a worker, large enough that few tokens are near a cut.
PIECE_CHARS = 2**17
_WINDOW = 2**14  # characters at the end of a piece that are searched for a good place to cut
# A good place: before a space that follows a word, or after the end of a line.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_BLOCK_BYTES = 2**18  # bytes read at once
_MAX_LINE_BYTES = 2**26  # longest line of JSON Lines
# A longer line than the first number may have at most the second number of bytes outside of its texts.
_LARGE_LINE_BYTES = _MAX_STRUCTURE_BYTES = 2**20
_BATCH_BYTES = 2**23  # bytes of Parquet rows read at once
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeError, SyntaxError)


Document = str | LongText


def pieces(blocks: Iterable[str], chars: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the text of the blocks in pieces of at most `chars` characters."""
    rest = ""
    for block in blocks:
        rest += block
        begin = 0
        while len(rest) - begin > chars:
            end = begin + chars
            # Candidates near the end only, so that pieces are nearly full.
            for cut in _CUT.finditer(rest, end - min(_WINDOW, chars // 2), end + 1):
                end = cut.end()  # after the loop: the last good place in the window
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
    """Progress of reading: bytes for the progress bar, and the file.

    Attributes:
        before: bytes of the files before the present one.
        here: bytes read from the present file.
        file: index of the present file.
    """

    before: int = 0
    here: int = 0
    file: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes read so far from all files."""
        return self.before + self.here


Reader = Callable[..., Iterator[Document | None]]


def read_files(
    files: Sequence[Path],
    read: Reader,
    meter: Meter,
    /,
    **options: Any,
) -> Iterator[Document]:
    """Yield the documents of several files.

    Args:
        files: the files, in order.
        read: reader of one file, called as `read(file, meter, **options)`.
        meter: is updated while reading.
        **options: keyword arguments of the reader.
    """
    meter.before = meter.here = 0
    for number, file in enumerate(files):
        meter.file = number
        try:
            # None and "" are not documents.
            for document in read(file, meter, **options):
                if document:
                    yield document
        except _UNREADABLE as error:
            raise _unreadable(str(file), error) from error
        # Count the whole file now, even if the reader's buffer has not reached its end.
        meter.before, meter.here = meter.before + file.stat().st_size, 0


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: cannot be read ({error}); replace the file or leave it out")


class _Metered(Unpacked):
    """File that counts the bytes read, for the progress bar."""

    def __init__(self, file: Path, meter: Meter) -> None:
        super().__init__(file)
        self._meter = meter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._meter.here = self.position
        return count


def _open(file: Path, meter: Meter) -> Any:
    """Open a file of bytes. UTF-16 or UTF-32 that begins with its mark, as Windows saves it, is handed on in UTF-8."""
    content = io.BufferedReader(_Metered(file, meter), _BLOCK_BYTES)
    begin = content.peek(4)[:4]
    if begin[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return content
    is_long = begin == codecs.BOM_UTF32_LE
    return codecs.EncodedFile(content, "utf-8", "utf-32" if is_long else "utf-16")


def read_python(file: Path, meter: Meter) -> Iterator[str]:
    """Yield a Python source file as one document."""
    with tokenize.open(file) as lines:  # honours the file's coding line
        yield lines.read()
    meter.here = file.stat().st_size


def read_text(file: Path, meter: Meter, chars: int = 0) -> Iterator[Document]:
    """Yield a text file as one document, or as documents of at most `chars` characters."""
    if chars:
        yield from pieces(_decoded(file, meter), chars)
        return
    reading = pieces(_decoded(file, meter))
    first = next(reading, "")
    # A long text is read a second time, which costs less than keeping text of any length in memory.
    is_short = next(reading, None) is None
    yield first if is_short else LongText(lambda: pieces(_decoded(file, meter)))


def _decoded(file: Path, meter: Meter) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks, with a line feed at the end of every line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    # A carriage return, with or without a line feed, becomes a line feed, also where a block ends
    # between the two.
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, line, block = 0, 1, b" "
    with _open(file, meter) as content:
        while block:
            # The end of a block may cut a character: its first bytes wait in the decoder.
            pending = decoder.getstate()[0]
            try:
                block = content.read(_BLOCK_BYTES)
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # Count lines in the bytes of the file, since line endings are translated later.
                line += (pending + block)[: error.start].count(b"\n")
                where = offset - len(pending) + error.start
                raise DataError(
                    f"{file}:{line}: not UTF-8 at byte {where}; convert it (iconv) or leave it out"
                ) from error
            except _UNREADABLE as error:
                raise _unreadable(f"{file}:{line}", error) from error
            if offset == 0:
                text = text.removeprefix("\ufeff")  # a byte order mark
            offset, line = offset + len(block), line + block.count(b"\n")
            yield newlines.decode(text, final=not block)


def read_jsonl(
    file: Path, meter: Meter, key: str, take: TakeRow | None = None
) -> Iterator[Document]:
    """Yield a document for each line: the text in field `key`, or the result of `take(row, key, where=...)`."""
    number = 0
    with _open(file, meter) as lines:
        while True:
            number += 1
            try:
                # Read one byte more than the limit, so that `read_row` notices a line that is too long.
                line = lines.readline(_MAX_LINE_BYTES + 1)
            except _UNREADABLE as error:
                raise _unreadable(f"{file}:{number}", error) from error
            if not line:
                return
            if not line.isspace():
                where = f"{file}:{number}"
                yield (take or field)(read_row(line, where=where), key, where=where)


def read_row(line: bytes, *, where: str) -> Any:
    """Return the value of a line of JSON, using at most a few times the memory of the line."""
    if len(line) > _MAX_LINE_BYTES:
        raise DataError(
            f"{where}: a line of more than {_MAX_LINE_BYTES >> 20} MiB; give a text of that length a .txt file"
        )
    if len(line) > _LARGE_LINE_BYTES:
        # "[]" has two bytes and becomes an object of 56, so most of a long line must be text.
        plain = line.replace(b"\\\\", b"").replace(b'\\"', b"")
        if len(re.sub(rb'"[^"]*"?', b"", plain)) > _MAX_STRUCTURE_BYTES:
            raise DataError(f"{where}: a long line, and not for its text; is it JSON Lines?")
    try:
        try:
            return json.loads(line)
        except ValueError:  # perhaps for an integer that Python does not read
            return json.loads(line, parse_int=lambda n: int(n) if len(n) < 4300 else Digits(n))
    except ValueError as error:
        hint = (
            "; JSON Lines has a whole object in each line" if line.strip()[:1] in b"[{" else ""
        )
        if isinstance(error, UnicodeDecodeError):
            hint = "; convert the file to UTF-8 (iconv), or leave it out"
        raise DataError(f"{where}: not a line of JSON: {error}{hint}") from error
    except RecursionError:
        raise DataError(
            f"{where}: not a line of JSON that can be read: too deeply nested"
        ) from None


def read_csv(file: Path, meter: Meter, key: str) -> Iterator[str]:
    """Yield the text of column `key` in each row. The first row names the columns.

    Values are quoted as in RFC 4180. They are separated by commas or, if the first row has no comma, by semicolons, tabs or bars.
    """
    csv.field_size_limit(_MAX_LINE_BYTES)  # Python's own is 128 KiB
    lines = _lines(_decoded(file, meter), file)
    first = next(lines, "")
    separators = "\t,;|" if ".tsv" in ending_of(file) else ",;\t|"
    separator = next((c for c in separators if c in first), ",")
    rows = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    try:
        header = next(rows, [])
        if len({*header}) < len(header):
            raise DataError(
                f"{file}:1: two columns have one name; the first row must name them: {', '.join(header)[:200]}"
            )
        for row in rows:
            where = f"{file}:{rows.line_num}"
            if row and len(row) != len(header):
                raise DataError(
                    f"{where}: has {len(row)} values, and the first row {len(header)} names; quote values that hold "
                    f"{separator!r} or line ends"
                )
            if row:
                yield field(dict(zip(header, row, strict=True)), key, where=where)
    except csv.Error as error:
        raise _unreadable(f"{file}:{rows.line_num}", error) from error


def _lines(blocks: Iterable[str], file: Path) -> Iterator[str]:
    """Yield the lines of a text with their ends. Raise DataError for a line that is too long."""
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).split("\n")
        yield from (f"{line}\n" for line in lines)
        if len(rest) > _MAX_LINE_BYTES:
            raise DataError(
                f"{file}: a line of more than {_MAX_LINE_BYTES >> 20} MiB; is it CSV?"
            )
    if rest:
        yield rest


def read_parquet(
    file: Path, meter: Meter, key: str, take: TakeRow | None = None
) -> Iterator[Document]:
    """Yield a document for each row: the text in column `key`, or the result of `take(row, key, where=...)`.

    A row for `take` has its other columns, too.
    """
    with open_parquet(file) as table:
        names = table.schema_arrow.names
        if key not in names:
            listed = ", ".join(name[:40] for name in names[:20])
            kinds = zip(names, map(str, table.schema_arrow.types), strict=True)
            likely = next(
                (name for name, kind in kinds if kind in ("string", "large_string")), ""
            )
            message = f"{file}: no column '{key}'; its columns are {listed} ({SET_KEY})"
            raise NoText(message, likely)
        columns = [key, *(name for name in names if take and name in take.columns)]
        if any(names.count(name) > 1 for name in columns):
            raise DataError(f"{file}: two columns have one name: {', '.join(names)[:200]}")
        others = tuple(name for name in names if name not in columns)
        size = file.stat().st_size
        num_chars, most_chars = 0, max(Unpacked.RATIO_FROM_BYTES, Unpacked.MAX_RATIO * size)
        rows = count(1)
        for number in range(table.num_row_groups):
            where = f"{file}, row group {number}"
            # Batch by batch: a row group may be larger than the memory.
            batches = table.iter_batches(
                batch_size=rows_at_a_time(table.metadata.row_group(number), key),
                row_groups=[number],
                columns=columns,
            )
            while (values := next_batch(batches, where=where)) is not None:
                for value, row in zip(values, rows):  # noqa: B905 (rows has no end)
                    # A dictionary holds a text once, and a few bytes say that it is that of all rows.
                    num_chars += _num_chars(value)
                    if num_chars > most_chars:
                        raise DataError(
                            f"{file}: its {size:,} bytes hold more than {most_chars:,} characters, which no text does; "
                            "replace the file or leave it out"
                        )
                    place = f"{file}, row {row}"
                    fields = from_parquet(value, where=where if take is None else place)
                    if take is None:
                        text = plain_text(fields.get(key), key, where=where)
                        yield row_text(text, others, where=place)
                    else:
                        yield take(fields | dict.fromkeys(others, True), key, where=place)
            meter.here = size * (number + 1) // table.num_row_groups


def _num_chars(value: Any) -> int:
    """Return the number of characters of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def open_parquet(file: Path) -> Any:
    """Open a Parquet file."""
    parquet = require("pyarrow.parquet", purpose=f"reading {file}")
    try:
        # Without checksums, a corrupt page would give other text and no error.
        return parquet.ParquetFile(file, page_checksum_verification=True)
    except Exception as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from error


def rows_at_a_time(group: Any, key: str) -> int:
    """Return how many rows of a column to read at once, so that they take a few megabytes."""
    columns = [group.column(n) for n in range(group.num_columns)]
    # Each field inside a list is a column of its own: "messages.list.element.content".
    columns = [c for c in columns if f"{c.path_in_schema}.".startswith(f"{key}.")]
    held = sum(column.total_uncompressed_size for column in columns)
    # Each row may be the largest value of a dictionary, which is stored once.
    if not any(column.has_dictionary_page for column in columns):
        held //= max(group.num_rows, 1)
    return max(1, min(1024, _BATCH_BYTES // max(held, 1)))


def next_batch(batches: Iterator[Any], *, where: str) -> list[Any] | None:
    """Return the rows of the next batch, or None after the last batch."""
    try:
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist(maps_as_pydicts="strict")
    except Exception as error:  # pyarrow raises many kinds of errors for corrupt pages
        raise _unreadable(where, error) from error
