"""Marks of documents: ids before and after each document show where it begins and ends.

Text never encodes to these ids (tokenizer.py). So the tokens themselves show where documents begin, from any source.

In a conversation, a chat template writes special tokens anywhere, and only answers are predicted. So each id of a conversation
has a kind in the bits above the largest id: kind << KIND_SHIFT | id. Ids of plain text have no kind.

B samples, T tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.data.tokenizer import Tokenizer

if TYPE_CHECKING:  # `titan check` reads tokenizers and needs no arrays
    import numpy as np

KIND_SHIFT = 24
# Kinds of a conversation's tokens: in an answer, outside of answers, and first token. Only PREDICTED tokens are labels.
PREDICTED, CONTEXT, START = 1, 2, 3


def without_kind(tokens: np.ndarray) -> np.ndarray:
    """Return the ids alone. Padding, which is negative, stays."""
    return tokens & (tokens >> 63 | (1 << KIND_SHIFT) - 1)


def begin_ids(tokenizer: Tokenizer, *, add_bos: bool) -> list[int]:
    """Return the ids that begin a text to be continued or scored, as in training.

    Args:
        tokenizer: the tokenizer of the model.
        add_bos: whether training added the begin token (`data.add_bos`).
    """
    if not add_bos or tokenizer.begin_ids is not None:
        return list(tokenizer.begin_ids or ()) if add_bos else []
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token that predicts the first token of a text without context, or [] if the tokenizer has no such token."""
    marks = (tokenizer.bos_id, tokenizer.eos_id)
    return [token for token in marks if token is not None][:1]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin and end a document. None means that no id is written there."""

    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, *, add_bos: bool = True, add_eos: bool = True) -> SpecialTokens:
        """Return the wanted ids that the tokenizer has."""
        # Models of a tokenizer that puts nothing before a text were trained on documents without a begin token.
        bos_id = tokenizer.bos_id if add_bos and tokenizer.begin_ids != [] else None
        eos_id = tokenizer.eos_id if add_eos else None
        if tokenizer.bos_id == tokenizer.eos_id:
            # GPT-2's vocabulary has one token for both. Write it once, at the beginning.
            return SpecialTokens(eos_id if bos_id is None else bos_id, None)
        return SpecialTokens(bos_id, eos_id)

    @property
    def marks_boundaries(self) -> bool:
        """Return whether the tokens show where documents begin."""
        return self.bos_id is not None or self.eos_id is not None

    def wrap(self, ids: list[int], *, first: bool = True, last: bool = True) -> list[int]:
        """Add the begin and end ids to the ids of a document, or of its first, middle or last piece."""
        head = [self.bos_id] if first and self.bos_id is not None else []
        tail = [self.eos_id] if last and self.eos_id is not None else []
        return head + ids + tail

    def starts(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return where documents begin, bool[B, T]: at each begin token, or after each end token."""
        # -1 matches no token.
        starts_BT = tokens_BT == (-1 if self.bos_id is None else self.bos_id)
        if self.eos_id is not None:
            starts_BT[:, 1:] |= tokens_BT[:, :-1] == self.eos_id
        return starts_BT
