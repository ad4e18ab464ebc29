"""SpecialTokens: the ids written before and after each document.

Text cannot hold these ids (tokenizer.py), so where documents begin is read off the tokens themselves, whatever
source they came from. Legend: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin and end a document; None where nothing is written."""

    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, *, add_bos: bool = True, add_eos: bool = True) -> SpecialTokens:
        """The ids the tokenizer has, of those that are wanted."""
        bos_id = tokenizer.bos_id if add_bos else None
        eos_id = tokenizer.eos_id if add_eos else None
        if tokenizer.bos_id == tokenizer.eos_id:
            # GPT-2's vocabulary has one token for both: written once, in front.
            return SpecialTokens(bos_id if add_bos else eos_id, None)
        return SpecialTokens(bos_id, eos_id)

    @property
    def marks_boundaries(self) -> bool:
        return self.bos_id is not None or self.eos_id is not None

    def wrap(self, ids: list[int], *, first: bool = True, last: bool = True) -> list[int]:
        """Return a document's ids with its frame; of a piece of one with what belongs to its first or last piece."""
        head = [self.bos_id] if first and self.bos_id is not None else []
        tail = [self.eos_id] if last and self.eos_id is not None else []
        return head + ids + tail

    def starts(self, tokens_BT: np.ndarray) -> np.ndarray:
        """True where a document begins: at its begin token, or after another's end token."""
        starts_BT = np.zeros(tokens_BT.shape, dtype=bool)
        if self.bos_id is not None:
            starts_BT |= tokens_BT == self.bos_id
        if self.eos_id is not None:
            starts_BT[:, 1:] |= tokens_BT[:, :-1] == self.eos_id
        return starts_BT
