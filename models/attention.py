"""Compute attention in this one place. Every model calls `InnerAttention` between its projections.

Context parallelism, document masks and key/value caches act here and nowhere else: they replace or wrap this
module from outside, and no model file changes.

B batch, S query positions, T key positions, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.parallel.block_attention import match_heads
from titan.parallel.documents import DocumentMask, mask_of

DocumentIds: TypeAlias = Tensor | DocumentMask


class InnerAttention(nn.Module):
    """Compute causal scaled-dot-product attention over grouped heads, optionally only within documents.

    scale: of the products of queries and keys; None: 1 / sqrt(K).
    """

    is_causal_softmax = True  # so that context parallelism may compute it block by block

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: DocumentIds | None = None,
    ) -> Tensor:
        """Return the attention output, (B, H, S, K) in the inputs' dtype; with values of another size than K, of that size.

        document_ids_BS (int64) numbers the documents packed into each sequence: a query sees only keys
        of the same document. A `DocumentMask` made of them once serves all layers. H must be a multiple of G; query head h reads key/value head h // (H // G).
        """
        if document_ids_BS is not None:
            mask = document_ids_BS
            mask = mask_of(mask) if isinstance(mask, Tensor) else mask
            return mask.attend(q_BHSK, k_BGSK, v_BGSK, scale=self.scale)
        k_BGSK, v_BGSK = match_heads(q_BHSK, k_BGSK, v_BGSK)
        return F.scaled_dot_product_attention(
            q_BHSK,
            k_BGSK,
            v_BGSK,
            is_causal=True,
            scale=self.scale,
            enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1],
        )


class CachedAttention(nn.Module):
    """Wrap an inner attention for generation: keep the keys and values of the positions seen so far.

    The first call takes the whole prompt, each later call the one next token.
    """

    def __init__(self, inner: InnerAttention) -> None:
        super().__init__()
        self.inner = inner
        self.k_BGTK: Tensor | None = None
        self.v_BGTK: Tensor | None = None

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: DocumentIds | None = None,
    ) -> Tensor:
        """Return the attention output, (B, H, S, K). Raises ValueError for several tokens after the first call."""
        if self.k_BGTK is None or self.v_BGTK is None:
            # The prompt: nothing is cached yet, and the inner attention masks it.
            self.k_BGTK, self.v_BGTK = k_BGSK, v_BGSK
            return self.inner(q_BHSK, k_BGSK, v_BGSK, document_ids_BS)
        if q_BHSK.shape[2] != 1:
            raise ValueError(f"one token a call after the prompt, got {q_BHSK.shape[2]}")
        self.k_BGTK = torch.cat([self.k_BGTK, k_BGSK], dim=2)
        self.v_BGTK = torch.cat([self.v_BGTK, v_BGSK], dim=2)
        # The newest token sees everything before it: no mask.
        return F.scaled_dot_product_attention(
            q_BHSK,
            self.k_BGTK,
            self.v_BGTK,
            scale=self.inner.scale,
            enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1],
        )
