"""Batches of a training step, made from sequences of tokens.

B batch, S sequence length, T = S + 1 tokens of a sample, so that each of the S inputs has a label, M modules of multi-token
prediction, N documents
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from titan.data.base import TensorBatch
from titan.data.special_tokens import CONTEXT, KIND_SHIFT, START, SpecialTokens, without_kind
from titan.losses.loss import IGNORED
from titan.parallel.documents import document_cu_seqlens


@dataclass(frozen=True, kw_only=True)
class Batch(TensorBatch):
    """One micro-batch of text. The tensors are int64[B, S], unless their docstring says otherwise."""

    ALONG_SEQUENCE: ClassVar[tuple[str, ...]] = (
        "tokens_BS",
        "labels_BS",
        "positions_BS",
        "document_ids_BS",
        "groups_BS",
        "mtp_targets_BSM",
        "mtp_labels_BSM",
    )

    tokens_BS: Tensor
    labels_BS: Tensor
    """The token after each token, or IGNORED if it is not to be predicted."""
    positions_BS: Tensor | None = None
    """Positions counted from the beginning of each document, or None to count from the beginning of the sequence."""
    document_ids_BS: Tensor | None = None
    """Number of the document within its sequence, for the attention mask, or None for the causal mask alone."""
    cu_seqlens_BN: Tensor | None = None
    """int32: end of each document within its sequence, without a leading 0 and padded with S, from
    `titan.parallel.documents.document_cu_seqlens`. Equal on all context-parallel ranks."""
    groups_BS: Tensor | None = None
    """Group of each label, by which the loss is summed (titan/losses/groups.py), or None."""

    mtp_targets_BSM: Tensor | None = None
    """int64[B, S, M]: inputs of multi-token prediction. Module m = 0, 1, ... reads the token m + 1 places ahead."""
    mtp_labels_BSM: Tensor | None = None
    """int64[B, S, M]: labels of multi-token prediction. Module m predicts the token m + 2 places ahead.

    The label is IGNORED if that token is in another document or beyond the sequence.
    """

    def with_mtp_targets(self, count: int) -> Batch:
        """Return the batch with inputs and labels for `count` modules of multi-token prediction. Sequences must be whole."""
        tokens, labels = [], []
        ids_BS, length = self.document_ids_BS, self.tokens_BS.shape[1]
        places = torch.arange(length, device=self.tokens_BS.device)
        for ahead in range(1, count + 1):
            is_known = places < length - ahead
            if ids_BS is not None:
                is_known = is_known & (ids_BS == ids_BS.roll(-ahead, dims=1))
            # `roll` wraps around: tokens from the beginning of the sequence come to places whose label is IGNORED.
            tokens.append(self.tokens_BS.roll(-ahead, dims=1))
            labels.append(self.labels_BS.roll(-ahead, dims=1).where(is_known, IGNORED))
        return replace(
            self,
            mtp_targets_BSM=torch.stack(tokens, dim=-1),
            mtp_labels_BSM=torch.stack(labels, dim=-1),
        )

    def with_sources(self, sources_B: Tensor) -> Batch:
        return replace(self, groups_BS=sources_B[:, None].repeat(1, self.tokens_BS.shape[1]))

    def ignore_from(self, row: int) -> None:
        """Ignore the labels of the samples from index `row` on, in place."""
        self.labels_BS[row:] = IGNORED


def pack(
    rows_BT: np.ndarray,
    *,
    special_tokens: SpecialTokens,
    reset_positions: bool,
    document_mask: bool,
    first_sample: int = 0,
) -> Batch:
    """Make a batch from samples.

    Args:
        rows_BT: int64, tokens with their kinds (special_tokens.py). The end of a sample may be padding, IGNORED.
        special_tokens: ids that begin and end a document.
        reset_positions: count positions from the last document start in the sequence. A document that began in an earlier
            sequence counts from 0.
        document_mask: number the documents of a sequence from 0, and ignore a label that belongs to the next document.
        first_sample: global number of the first sample.

    Returns:
        A batch on the CPU.
    """
    kinds_BT = np.maximum(rows_BT, 0) >> KIND_SHIFT  # 0 for text and padding
    rows_BT = without_kind(rows_BT)
    labels_BS = rows_BT[:, 1:].copy()
    labels_BS[kinds_BT[:, 1:] >= CONTEXT] = IGNORED
    # Padding is ignored as a label. As input, all padding of a sample is one document.
    is_padding_BT = rows_BT < 0
    if is_padding_BT.any():
        mark = special_tokens.eos_id if special_tokens.bos_id is None else special_tokens.bos_id
        rows_BT = np.where(is_padding_BT, mark or 0, rows_BT)
    none = np.zeros_like(rows_BT, dtype=bool)  # cheaper than a search for starts
    starts_BT = special_tokens.starts(rows_BT) if reset_positions or document_mask else none
    # The kinds show where a conversation begins, whatever tokens its template writes.
    starts_BT = np.where(kinds_BT > 0, kinds_BT == START, starts_BT)
    starts_BT[:, 1:] &= ~(is_padding_BT[:, 1:] & is_padding_BT[:, :-1])
    # The last token of a sample is a label only.
    starts_BS = starts_BT[:, :-1].copy()
    starts_BS[:, 0] = False  # the first token of a sequence always begins document 0
    positions_BS = document_ids_BS = cu_seqlens_BN = None
    if reset_positions:
        place_S = np.arange(starts_BS.shape[1])
        # Place of the last document start at or before each token.
        start_BS = np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        positions_BS = torch.from_numpy(place_S - start_BS)
    if document_mask:
        document_ids_BS = torch.from_numpy(np.cumsum(starts_BS, axis=1))
        cu_seqlens_BN = document_cu_seqlens(document_ids_BS)
        # The last token of a document must not predict the first one of the next.
        labels_BS[starts_BT[:, 1:]] = IGNORED
    return Batch(
        tokens_BS=torch.from_numpy(rows_BT[:, :-1].copy()),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=positions_BS,
        document_ids_BS=document_ids_BS,
        cu_seqlens_BN=cu_seqlens_BN,
        first_sample=first_sample,
    )
