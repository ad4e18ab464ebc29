"""Mark where documents begin and end, by ids before and after each one.

Text cannot hold these ids (tokenizer.py). So the tokens themselves show where documents begin, whatever source they come
from. Legend: B rows, T tokens.

In a conversation, a chat template writes special tokens anywhere, and only answers are predicted. So each of its ids has a
kind in the bits above the largest id: kind << KIND_SHIFT | id. Ids of plain text have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan.data.tokenizer import Tokenizer

if TYPE_CHECKING:  # `titan check` reads tokenizers and needs no arrays
    import numpy as np

KIND_SHIFT = 24
# Kinds of a conversation's tokens: of an answer, of anything else, and the first one, which nothing predicts either.
PREDICTED, CONTEXT, START = 1, 2, 3


def without_kind(tokens: np.ndarray) -> np.ndarray:
    """Return the ids alone. Padding, which is negative, stays."""
    return tokens & (tokens >> 63 | (1 << KIND_SHIFT) - 1)


def begin_ids(tokenizer: Tokenizer, *, add_bos: bool) -> list[int]:
    """Return what begins a text that a model continues or scores, as it began those that the model was trained on."""
    if not add_bos or tokenizer.begin_ids is not None:
        return list(tokenizer.begin_ids or ()) if add_bos else []
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token that predicts the first one of a text without context, none if the tokenizer has none."""
    marks = (tokenizer.bos_id, tokenizer.eos_id)
    return [token for token in marks if token is not None][:1]


@dataclass(frozen=True)
class SpecialTokens:
    """Hold the ids that begin and end a document. None: nothing is written there."""

    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, *, add_bos: bool = True, add_eos: bool = True) -> SpecialTokens:
        """Return those of the wanted ids that the tokenizer has."""
        # A tokenizer that puts nothing in front of texts has learned documents without it.
        bos_id = tokenizer.bos_id if add_bos and tokenizer.begin_ids != [] else None
        eos_id = tokenizer.eos_id if add_eos else None
        if tokenizer.bos_id == tokenizer.eos_id:
            # GPT-2's vocabulary has one token for both. It is written once, in front.
            return SpecialTokens(eos_id if bos_id is None else bos_id, None)
        return SpecialTokens(bos_id, eos_id)

    @property
    def marks_boundaries(self) -> bool:
        """Return whether the tokens show where documents begin."""
        return self.bos_id is not None or self.eos_id is not None

    def wrap(self, ids: list[int], *, first: bool = True, last: bool = True) -> list[int]:
        """Return the ids of a document, or of its first, middle or last piece, with the marks that belong there."""
        head = [self.bos_id] if first and self.bos_id is not None else []
        tail = [self.eos_id] if last and self.eos_id is not None else []
        return head + ids + tail

    def starts(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return where a document begins, bool[B, T]: at its begin token, or after an end token."""
        # No token has the id -1.
        starts_BT = tokens_BT == (-1 if self.bos_id is None else self.bos_id)
        if self.eos_id is not None:
            starts_BT[:, 1:] |= tokens_BT[:, :-1] == self.eos_id
        return starts_BT
