"""Rows of files: the text, or the conversation, that a row holds, and the keys that are not read.

A conversation is a list of messages, and what stands beside it for the chat template:

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...], "documents": [...], "chat_template_kwargs": {...}}

These keys are those of transformers' `apply_chat_template` and of TRL's data sets. A message may have any keys, which the template
reads or not. "weight": 0 (OpenAI's format) and "train": false (axolotl's) mark an answer that is context and is not learnt.
All functions raise `DataError` for a row that is unusable. It names the place `where`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan.base.untrusted import parse_json
from titan.data import DataError

Messages = list[dict[str, Any]]
Chat = Messages | dict[str, Any]
"""Messages, or a table with the messages and what stands beside them."""
SET_KEY = "set text_key; for titan prepare and tokenizer, --text-key"
# Columns beside the messages that a chat template may read.
BESIDE: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}
_NO_TEXT = {int: "a number", float: "a number", bool: "true or false"}
_NO_TEXT |= {list: "a list", dict: "an object", bytes: "binary"}
_EXAMPLE = '{"role": "user", "content": "..."}'


class RowText(str):
    """Text of a row, with the row's keys that nothing read."""

    unread: tuple[str, ...] = ()


def row_text(text: str, unread: Iterable[str]) -> RowText:
    """Return the text with the row's keys that nothing read."""
    found = RowText(text)
    found.unread = tuple(unread)
    return found


@dataclass(frozen=True)
class LongText:
    """Document that is read in pieces. Each call of `read` starts at the beginning of the document."""

    read: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Conversation(LongText):
    """List of messages, as one piece of JSON.

    Attributes:
        where: file and line, for an error of the template.
        unread: keys of the row that nothing read.
    """

    where: str
    unread: tuple[str, ...] = ()


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
    return row_text(plain_text(fields[key], key, where=where), others)


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects: a Parquet column gives each object the fields of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def plain_text(text: Any, key: str, *, where: str) -> str:
    """Return the text of a field, or "" for null."""
    if text is None:
        return ""
    if not isinstance(text, str):
        kind = _NO_TEXT.get(type(text), type(text).__name__)
        raise DataError(f"{where}: '{key}' is {kind}, not text ({SET_KEY})")
    # JSON can spell half a surrogate pair and UTF-8 cannot, so it becomes U+FFFD.
    if re.search("[\ud800-\udfff]", text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def messages_of(row: Any, key: str, *, where: str) -> Messages:
    """Return the messages of a row's field. The error names the message that is wrong."""
    messages = row.get(key) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        listed = ", ".join(name[:40] for name in row) if isinstance(row, dict) else "none"
        raise DataError(
            f"{where}: no list of messages, such as {_EXAMPLE}, under '{key}'; its fields are {listed} (set messages_key)"
        )
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role:
            raise DataError(f"{where}: message {number} has no role; write {_EXAMPLE}")
        content = message.get("content")
        has_text = isinstance(content, str) or (content is None and message.get("tool_calls"))
        if not has_text and not (
            isinstance(content, list) and content and all(map(_is_text, content))
        ):
            raise DataError(
                f"{where}: message {number} has no text as content; write {_EXAMPLE}"
            )
    # As transformers does: templates take a missing key for null.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _is_text(part: Any) -> bool:
    """Return whether a part of a content is a text: {"type": "text", "text": "..."}."""
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def chat_of(row: Any, key: str, *, where: str) -> Chat:
    """Return the messages of a row's field, with what stands beside them in the row, as a list or as JSON text."""
    messages, beside = messages_of(row, key, where=where), {}
    for name, kind in BESIDE.items():
        value = row.get(name)
        if value and not isinstance(value, kind):
            text = value if isinstance(value, str) else json.dumps(value)
            value = parse_json(text, kind, name=f"{where}: {name}")
        if value:
            beside[name] = value
    return {"messages": messages, **beside} if beside else messages


def is_learnt(answer: Mapping[str, Any], *, where: str) -> bool:
    """Return whether an answer is learnt: one without "weight": 0 and "train": false.

    Raises:
        DataError: a value is neither 0 nor 1, or neither true nor false.
    """
    values = [answer.get("weight"), answer.get("train")]
    for value in values:
        if value not in (None, 0, 1):
            raise DataError(
                f'{where}: an answer has {value!r} as "weight" or "train"; write 1 or true (learnt), or 0 or false'
            )
    return 0 not in values


def conversation(row: Any, key: str, *, where: str) -> Conversation:
    """Return the conversation of a row's field. At least one message must be an answer."""
    chat = chat_of(row, key, where=where)
    messages = chat if isinstance(chat, list) else chat["messages"]
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f'{where}: no message has the role "assistant", whose text is learnt')
    text = plain_text(json.dumps(chat, ensure_ascii=False), key, where=where)
    # Replace the characters that chat.py uses as marks around answers.
    text = re.sub("[\ufdd0\ufdd1]", "\ufffd", text)
    unread = (
        name for name, value in row.items() if name not in (key, *BESIDE) and value is not None
    )
    return Conversation(lambda: iter([text]), where, tuple(unread))
