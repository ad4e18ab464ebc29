"""Mask tokens of text, and train on those that were masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from titan.data.base import Samples
from titan.data.order import derive_key
from titan.data.packing import Batch
from titan.losses.loss import IGNORED
from titan.tasks.next_token import NextToken


class MaskedTokens(NextToken):
    """Replace a share of the tokens by one id, and predict what they were."""

    def collate(self, samples: Samples) -> Callable[..., Batch]:
        """Return what packs rows as for the next token, and masks them."""
        pack = super().collate(samples)

        def mask(rows_BT: np.ndarray, *, first_sample: int) -> Batch:
            batch = pack(rows_BT, first_sample=first_sample)
            assert isinstance(batch, Batch)
            tokens_BS = batch.tokens_BS
            numbers = range(first_sample, first_sample + len(rows_BT))
            chosen = np.stack([self._draw(number, tokens_BS.shape[1]) for number in numbers])
            chosen_BS = torch.from_numpy(chosen & (rows_BT[:, :-1] >= 0))  # the rest is padding
            return replace(
                batch,
                tokens_BS=tokens_BS.masked_fill(chosen_BS, self.options.mask_id),
                labels_BS=tokens_BS.masked_fill(~chosen_BS, IGNORED),
            )

        return mask

    def _draw(self, number: int, length: int) -> np.ndarray:
        """Return which tokens of a sample are masked, the same on every layout."""
        generator = np.random.Generator(np.random.Philox(key=derive_key("mask", number)))
        return generator.random(length) < self.options.share

    def measure(self, batch: Any) -> float:
        """Return nothing: bits per byte of masked tokens alone say nothing about the text."""
        return 0

    def report(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return no columns beside the loss."""
        return {}
