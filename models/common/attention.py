"""Attention of all models, which call `InnerAttention` between their projections.

Windows, sinks, context parallelism, document masks and key/value caches act here and nowhere else. They replace or wrap this
module from outside, and no model file changes.

B batch, S query positions, T key positions, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.parallel.attention_sinks import attend_with_sinks
from titan.parallel.block_attention import AttentionSpec, match_heads
from titan.parallel.documents import DocumentMask, mask_of, mask_of_window

DocumentIds: TypeAlias = Tensor | DocumentMask


class Sinks(nn.Module):
    """Attention sinks: one logit for each query head (gpt-oss, arXiv:2508.10925).

    The logit joins the softmax of every query and has no value. Sinks are a module of their own, so that tensor parallelism
    can split them (style `head_vector`).
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return the logits of this rank's heads, (H,)."""
        return self.weight


class InnerAttention(nn.Module):
    """Scaled-dot-product attention over grouped heads, optionally only within documents.

    Attributes:
        scale: factor of the scores of queries and keys. None: 1 / sqrt(K).
        window: number of keys that a query sees, its own position included. 0: all of them. A block may set it.
        causal: whether a query sees no key after its position. False: it sees all keys, and a window is not allowed.
    """

    is_causal_softmax = True  # so that context parallelism may compute it block by block

    def __init__(
        self, *, scale: float | None = None, window: int = 0, causal: bool = True
    ) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.causal = causal

    @property
    def spec(self) -> AttentionSpec:
        """Return the attention spec: which keys a query sees.

        Raises:
            ValueError: The attention has a window and is not causal.
        """
        if self.window and not self.causal:
            raise ValueError(f"a window of {self.window} needs attention that is causal")
        return AttentionSpec(self.causal, self.window)

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: DocumentIds | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            q_BHSK: queries. H is a multiple of G, and query head h reads key/value head h // (H // G).
            k_BGSK: keys.
            v_BGSK: values, whose head dim may differ from that of the keys.
            document_ids_BS: numbers of the documents that are packed into each sequence, int64. A query sees only keys of
                its own document. A `DocumentMask` that is made of them once serves all layers. None: no documents.
            sinks_H: logits of `Sinks` for these heads. None: no sinks.

        Returns:
            The attention output, (B, H, S, head dim of the values), in the inputs' dtype.
        """
        mask, spec = document_ids_BS, self.spec
        if isinstance(mask, Tensor):
            mask = mask_of(mask, specs=(spec,))
        elif mask is None and 0 < self.window < q_BHSK.shape[2]:
            mask = mask_of_window(q_BHSK, spec)
        options = {"spec": spec, "scale": self.scale}
        if mask is not None:
            return mask.attend(q_BHSK, k_BGSK, v_BGSK, **options, sinks_H=sinks_H)
        if sinks_H is not None:
            return attend_with_sinks(q_BHSK, k_BGSK, v_BGSK, sinks_H, **options)
        k_BGSK, v_BGSK = match_heads(q_BHSK, k_BGSK, v_BGSK)
        return F.scaled_dot_product_attention(
            q_BHSK,
            k_BGSK,
            v_BGSK,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1],
        )
