"""Rows of files: the text that a row holds, and the keys that are not read.

All functions raise `DataError` for a row that is unusable. It names the place `where`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titan.data import DataError

SET_KEY = "set text_key; for titan prepare and tokenizer, --text-key"


class Digits(str):
    """Digits of an integer that is too long for Python's `int`."""


_NO_TEXT = {int: "a number", float: "a number", bool: "true or false"}
_NO_TEXT |= {list: "a list", dict: "an object", Digits: "a number"}


class RowText(str):
    """Text of a row, with the row's keys that nothing read."""

    unread: tuple[str, ...] = ()
    where: str = ""


def row_text(text: str, unread: Iterable[str], *, where: str) -> RowText:
    """Return the text with the row's keys that nothing read, and its place."""
    found = RowText(text)
    found.unread, found.where = tuple(unread), where
    return found


@dataclass(frozen=True)
class LongText:
    """Document that is read in pieces. Each call of `read` starts at the beginning of the document."""

    read: Callable[[], Iterator[str]]


class TakeRow(Protocol):
    """Makes a document of a row, such as titan's part for conversations does.

    Attributes:
        columns: fields that it reads beside that of its key.
    """

    columns: Sequence[str]

    def __call__(self, row: Any, key: str, *, where: str) -> LongText: ...


class NoText(DataError):
    """Error about a row that has no text under a key.

    Attributes:
        message: the error message alone.
        likely: name of the field that seems to contain the text, or "" if no field does.
    """

    def __init__(self, message: str, likely: str) -> None:
        super().__init__(message)
        self.message, self.likely = message, likely


def field(row: Any, key: str, *, where: str) -> RowText:
    """Return the text of a row's field.

    Raises:
        NoText: the row has no such field.
        DataError: the field is not text.
    """
    if not isinstance(row, dict):
        kind = "an array" if isinstance(row, list) else "one value"
        raise NoText(
            f"{where}: no text under '{key}': it is {kind}; JSON Lines has an object in each line, "
            f'such as {{"{key}": "..."}}',
            "",
        )
    fields: dict[str, Any] = row
    if key not in fields:
        names = sorted(fields)
        listed = ", ".join(name[:40] for name in names[:10]) or "none"
        more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
        # The longest text is likely the document.
        texts = {name: len(text) for name, text in fields.items() if isinstance(text, str)}
        raise NoText(
            f"{where}: no text under '{key}'; its fields are {listed}{more} ({SET_KEY})",
            max(texts, key=lambda name: texts[name], default=""),
        )
    others = (name for name, value in fields.items() if name != key and value is not None)
    return row_text(plain_text(fields[key], key, where=where), others, where=where)


def from_parquet(value: Any, *, where: str) -> Any:
    """Return a value without the nulls of its objects, which get the fields of all rows, and with bytes, as Spark writes them, as text."""
    if isinstance(value, dict):
        fields = value.items()
        return {k: from_parquet(v, where=where) for k, v in fields if v is not None}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            message = f"{where}: a column is binary, and no UTF-8 text ({SET_KEY})"
            raise DataError(message) from error
    return [from_parquet(v, where=where) for v in value] if isinstance(value, list) else value


def plain_text(text: Any, key: str, *, where: str) -> str:
    """Return the text of a field, or "" for null."""
    if text is None:
        return ""
    if type(text) in _NO_TEXT or not isinstance(text, str):
        kind = _NO_TEXT.get(type(text), type(text).__name__)
        raise DataError(f"{where}: '{key}' is {kind}, not text ({SET_KEY})")
    # JSON can spell half a surrogate pair and UTF-8 cannot, so it becomes U+FFFD.
    if re.search("[\ud800-\udfff]", text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
