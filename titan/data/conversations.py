"""Contract of the optional part for conversations. Imports neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from titan.config.plug_ins import door, require_part
from titan.data.rows import TakeRow
from titan.data.tokenizer import Tokenizer
from titan.data.unread import Counts

if TYPE_CHECKING:
    import numpy as np


class Template(Protocol):
    """Chat template, which turns a conversation into tokens."""

    source: str

    def encode(self, chat: Any, *, where: str, unread: Counts | None = None) -> np.ndarray: ...

    def unread_beside(self, chat: Any) -> list[str]: ...

    def prompt(self, chat: Any, *, where: str) -> list[int]: ...


@door("chat")
class Conversations(Protocol):
    """Functions for conversations: their messages, and the chat template that turns these into tokens."""

    def template_of(self, tokenizer: Tokenizer) -> Template:
        """Return the chat template of a tokenizer.

        Raises:
            DataError: it has none.
        """
        ...

    def take_conversation(self) -> TakeRow:
        """Return the reader of a row, which makes a document of its messages."""
        ...

    def answer_ends(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids that end an answer, the most likely first."""
        ...

    def chat_of(self, row: Any, key: str, *, where: str) -> Any:
        """Return the messages of a row's field, with the tools that stand beside them.

        Raises:
            DataError: the field holds no messages.
        """
        ...


def conversations() -> Conversations:
    """Import titan's part for conversations: its chat template, and its reader of rows.

    Raises:
        ConfigError: it is not installed.
    """
    missing = "the part of titan/contrib for conversations is not installed; read plain text by text_key"
    return require_part(Conversations, key="messages_key", missing=missing)
