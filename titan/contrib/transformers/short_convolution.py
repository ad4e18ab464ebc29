"""Short causal convolution of each channel, between the projections of linear attention and the recurrence.

B batch, S positions, D channels, W kernel size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.parallel.documents import DocumentMask

from .linear_attention_borders import SequenceBorders


def short_convolution(
    x_BSD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    borders: SequenceBorders,
    *,
    document_ids_BS: Tensor | DocumentMask | None,
) -> Tensor:
    """Return the output of a causal depthwise convolution without activation, (B, S, D).

    Args:
        x_BSD: input.
        weight_DW: factors of a position and the W - 1 positions before it, its own the last.
        bias_D: bias of each channel, or None.
        borders: borders of this rank's part of the sequence.
        document_ids_BS: numbers of the documents that are packed into each sequence, int64, or
            their `DocumentMask`. A position sees its own document only. None: no documents.

    Raises:
        ValueError: A rank's pieces of the sequence are shorter than W - 1 positions.
    """
    starts_BS = borders.starts(document_ids_BS)
    x, factors = borders.split(x_BSD, dim=1), weight_DW.unbind(dim=-1)
    # Number of each position's document within its piece. The document 0 began in a piece before.
    numbers = None if starts_BS is None else borders.split(starts_BS, dim=1).long().cumsum(1)
    length, reach = x.shape[1], len(factors) - 1
    if borders.part is None:
        padded = F.pad(x, (0, 0, reach, 0))
    else:
        if length < reach:
            raise ValueError(
                f"context parallelism leaves pieces of {length} tokens, and a convolution needs the {reach} tokens before "
                "a piece from a single one: use longer sequences or fewer ranks"
            )
        last = x[:, length - reach :]
        if numbers is not None:  # only the document at the end goes on in the next piece
            is_over = numbers[:, length - reach :] != numbers[:, -1:]
            last = last.masked_fill(is_over[..., None], 0)
        padded = torch.cat([borders.before(last), x], dim=1)
    out = x * factors[reach]
    for distance in range(1, reach + 1):
        first = reach - distance
        seen = padded[:, first : first + length]
        if numbers is not None:
            there = F.pad(numbers, (reach, 0))[:, first : first + length]
            seen = seen.masked_fill((there != numbers)[..., None], 0)
        out = out + seen * factors[first]
    return borders.join(out if bias_D is None else out + bias_D, dim=1)
