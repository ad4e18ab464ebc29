"""Packing: documents become one long row of tokens, and rows of tokens become what a training step needs.

A document is framed by the begin and end ids (those the tokenizer has and the job wants). Its text cannot hold
these ids, so where documents begin is read off the tokens themselves, whatever source they came from.
Legend: B batch, S sequence length; a row has S+1 tokens, so that each of S inputs has its label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titan.data.tokenizer import Tokenizer

IGNORED = -100  # torch's cross entropy leaves this label out


@dataclass(frozen=True)
class Framing:
    """Ids written before and after each document; None where nothing is written."""

    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, *, add_bos: bool = True, add_eos: bool = True) -> Framing:
        bos, eos = tokenizer.bos_id if add_bos else None, tokenizer.eos_id if add_eos else None
        if tokenizer.bos_id is not None and tokenizer.bos_id == tokenizer.eos_id:
            # GPT-2's vocabulary has one token for both: written once, in front.
            return Framing(bos_id=bos if bos is not None else eos, eos_id=None)
        return Framing(bos_id=bos, eos_id=eos)

    @property
    def marks_boundaries(self) -> bool:
        return self.bos_id is not None or self.eos_id is not None

    def wrap(self, ids: list[int]) -> list[int]:
        """A document's ids with its frame."""
        head = [] if self.bos_id is None else [self.bos_id]
        return [*head, *ids, *([] if self.eos_id is None else [self.eos_id])]

    def starts(self, tokens_BT: np.ndarray) -> np.ndarray:
        """True where a document begins: at its begin token, or after another's end token."""
        starts_BT = np.zeros(tokens_BT.shape, dtype=bool)
        if self.bos_id is not None:
            starts_BT |= tokens_BT == self.bos_id
        if self.eos_id is not None:
            starts_BT[:, 1:] |= tokens_BT[:, :-1] == self.eos_id
        return starts_BT


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One micro-batch, int64 each; see loader.Batch."""

    tokens_BS: np.ndarray
    labels_BS: np.ndarray
    positions_BS: np.ndarray | None
    document_ids_BS: np.ndarray | None


def pack(
    rows_BT: np.ndarray, *, framing: Framing, reset_positions: bool, document_mask: bool
) -> Packed:
    """Inputs and labels of rows of S+1 tokens.

    With reset_positions, positions count from the last document start in the sequence (a document that began
    earlier counts from 0). With document_mask, document_ids number the documents of a sequence from 0, and
    a label that lies in the next document is ignored.
    """
    tokens_BS, labels_BS = rows_BT[:, :-1].copy(), rows_BT[:, 1:].copy()
    positions_BS = document_ids_BS = None
    if reset_positions or document_mask:
        starts_BT = framing.starts(rows_BT)
        starts_BS = starts_BT[:, :-1].copy()
        starts_BS[:, 0] = False  # the sequence's first token begins document 0 in any case
        if reset_positions:
            place_S = np.arange(tokens_BS.shape[1])
            positions_BS = place_S - np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        if document_mask:
            document_ids_BS = np.cumsum(starts_BS, axis=1)
            labels_BS[starts_BT[:, 1:]] = IGNORED
    return Packed(
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        positions_BS=positions_BS,
        document_ids_BS=document_ids_BS,
    )
