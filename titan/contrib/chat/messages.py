"""Conversations in the rows of files, and what stands beside the messages for the chat template.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...], "documents": [...], "chat_template_kwargs": {...}}

These keys are those of transformers' `apply_chat_template` and of TRL's data sets. A message may have any keys, which the template
reads or not. "weight": 0 (OpenAI's format) and "train": false (axolotl's) mark an answer that is context and is not learnt.
All functions raise `DataError` for a row that is unusable. It names the place `where`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan.base.untrusted import parse_json
from titan.data import DataError
from titan.data.rows import LongText, plain_text

Messages = list[dict[str, Any]]
Chat = Messages | dict[str, Any]
"""Messages, or a table with the messages and what stands beside them."""
# Fields beside the messages that a chat template may read.
_BESIDE: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}
_EXAMPLE = '{"role": "user", "content": "..."}'


@dataclass(frozen=True)
class Conversation(LongText):
    """List of messages, as one piece of JSON.

    Attributes:
        where: file and line, for an error of the template.
        unread: keys of the row that nothing read.
    """

    where: str
    unread: tuple[str, ...] = ()


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
    for name, kind in _BESIDE.items():
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


class TakeConversation:
    """Makes a conversation of a row: titan.data.rows.TakeRow."""

    columns = tuple(_BESIDE)

    def __call__(self, row: Any, key: str, *, where: str) -> Conversation:
        """Return the conversation of a row's field. At least one message must be an answer."""
        chat = chat_of(row, key, where=where)
        messages = chat if isinstance(chat, list) else chat["messages"]
        if all(message["role"] != "assistant" for message in messages):
            raise DataError(
                f'{where}: no message has the role "assistant", whose text is learnt'
            )
        text = plain_text(json.dumps(chat, ensure_ascii=False), key, where=where)
        # Replace the characters that template.py uses as marks around answers.
        text = re.sub("[\ufdd0\ufdd1]", "\ufffd", text)
        read = (key, *self.columns)
        unread = (name for name, value in row.items() if name not in read and value is not None)
        return Conversation(lambda: iter([text]), where, tuple(unread))
