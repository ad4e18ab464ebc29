"""Make a batch for a training step from rows of tokens.

Legend: B batch, S sequence length. A row has T = S + 1 tokens, so that each of its S inputs has a label.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from titan.data.base import TensorBatch
from titan.data.special_tokens import CONTEXT, KIND_SHIFT, START, SpecialTokens, without_kind
from titan.loss import IGNORED
from titan.parallel.documents import document_ends


@dataclass(frozen=True, kw_only=True)
class Batch(TensorBatch):
    """Hold one micro-batch of text. The tensors are int64[B, S]."""

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = (
        "tokens_BS",
        "labels_BS",
        "positions_BS",
        "document_ids_BS",
        "further_targets_BSM",
        "further_labels_BSM",
    )

    tokens_BS: Tensor
    labels_BS: Tensor
    """The token that follows each token; IGNORED where it is not to be predicted."""
    positions_BS: Tensor | None = None
    """Positions counted from each document's beginning; None: from the sequence's."""
    document_ids_BS: Tensor | None = None
    """Number of the document within its sequence, for the attention mask; None: only the causal mask."""
    document_ends_BN: Tensor | None = None
    """Where each document of a row ends, of `titan.parallel.documents.document_ends`: int32, the same for all context parallel ranks."""

    further_targets_BSM: Tensor | None = None
    """The token 1, 2, ... places after each, int64[B, S, M], for M modules of multi-token prediction."""
    further_labels_BSM: Tensor | None = None
    """What each module is to predict: the token after that one; IGNORED where it is another document's, or beyond the row."""

    def with_further_targets(self, count: int) -> Batch:
        """Return the batch with what `count` modules of multi-token prediction read and predict. Rows must be whole."""
        tokens, labels = [], []
        ids_BS, length = self.document_ids_BS, self.tokens_BS.shape[1]
        places = torch.arange(length, device=self.tokens_BS.device)
        for ahead in range(1, count + 1):
            is_known = places < length - ahead
            if ids_BS is not None:
                is_known = is_known & (ids_BS == ids_BS.roll(-ahead, dims=1))
            # What comes around from the beginning of the row is seen only by places that predict nothing.
            tokens.append(self.tokens_BS.roll(-ahead, dims=1))
            labels.append(self.labels_BS.roll(-ahead, dims=1).where(is_known, IGNORED))
        return replace(
            self,
            further_targets_BSM=torch.stack(tokens, dim=-1),
            further_labels_BSM=torch.stack(labels, dim=-1),
        )

    def ignore_from(self, row: int) -> None:
        """Ignore the labels of the rows from `row` on, in place."""
        self.labels_BS[row:] = IGNORED


def pack(
    rows_BT: np.ndarray,
    *,
    special_tokens: SpecialTokens,
    reset_positions: bool,
    document_mask: bool,
    first_sample: int = 0,
) -> Batch:
    """Return inputs and labels of rows of S + 1 tokens, of which the last may be padding, IGNORED.

    Args:
        reset_positions: count positions from the last document start in the sequence. A document that began in an
            earlier sequence counts from 0.
        document_mask: number the documents of a sequence from 0, and ignore a label that belongs to the next document.
    """
    kinds_BT = np.maximum(rows_BT, 0) >> KIND_SHIFT  # 0 for text and padding
    rows_BT = without_kind(rows_BT)
    labels_BS = rows_BT[:, 1:].copy()
    labels_BS[kinds_BT[:, 1:] >= CONTEXT] = IGNORED
    # Padding: ignored as a label, and one document as an input.
    is_padding_BT = rows_BT < 0
    if is_padding_BT.any():
        mark = special_tokens.eos_id if special_tokens.bos_id is None else special_tokens.bos_id
        rows_BT = np.where(is_padding_BT, mark or 0, rows_BT)
    none = np.zeros_like(rows_BT, dtype=bool)  # to look for them takes longer
    starts_BT = special_tokens.starts(rows_BT) if reset_positions or document_mask else none
    # A conversation says itself where it begins, whatever tokens its template writes.
    starts_BT = np.where(kinds_BT > 0, kinds_BT == START, starts_BT)
    starts_BT[:, 1:] &= ~(is_padding_BT[:, 1:] & is_padding_BT[:, :-1])
    # The last token of a row is a label only.
    starts_BS = starts_BT[:, :-1].copy()
    starts_BS[:, 0] = False  # the first token of a sequence always begins document 0
    positions_BS = document_ids_BS = document_ends_BN = None
    if reset_positions:
        place_S = np.arange(starts_BS.shape[1])
        # Place of the newest document start at or before each token.
        start_BS = np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        positions_BS = torch.from_numpy(place_S - start_BS)
    if document_mask:
        document_ids_BS = torch.from_numpy(np.cumsum(starts_BS, axis=1))
        document_ends_BN = document_ends(document_ids_BS)
        # The last token of a document must not predict the first one of the next.
        labels_BS[starts_BT[:, 1:]] = IGNORED
    return Batch(
        tokens_BS=torch.from_numpy(rows_BT[:, :-1].copy()),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=positions_BS,
        document_ids_BS=document_ids_BS,
        document_ends_BN=document_ends_BN,
        first_sample=first_sample,
    )
