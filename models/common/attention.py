"""Compute attention in this one place. Every model calls `InnerAttention` between its projections.

Windows, sinks, context parallelism, document masks and key/value caches act here and nowhere else: they replace or wrap this
module from outside, and no model file changes.

B batch, S query positions, T key positions, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.parallel.block_attention import AttentionSpec, attend_with_sinks, match_heads
from titan.parallel.documents import DocumentMask, mask_of, mask_of_window

DocumentIds: TypeAlias = Tensor | DocumentMask


class Sinks(nn.Module):
    """Hold a logit for each query head that joins the softmax of every query and has no value (gpt-oss, arXiv:2508.10925).

    A module of its own, so that tensor parallelism can split it (style `head_vector`).
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return the logits of this rank's heads, (H,)."""
        return self.weight


class InnerAttention(nn.Module):
    """Compute scaled-dot-product attention over grouped heads, optionally only within documents.

    Args:
        scale: of the products of queries and keys; None: 1 / sqrt(K).
        window: how many keys a query sees, the last of which is at its own position; 0: all of them. A block may set it.
        causal: a query sees no key after its position. Else it sees all, and there is no window.
    """

    is_causal_softmax = True  # so that context parallelism may compute it block by block

    def __init__(self, *, scale: float | None = None, window: int = 0, causal: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.causal = causal

    @property
    def spec(self) -> AttentionSpec:
        """Return which keys a query sees. Raises ValueError for a window of attention that is not causal."""
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
        """Return the attention output, (B, H, S, K) in the inputs' dtype; with values of another size than K, of that size.

        document_ids_BS (int64) numbers the documents packed into each sequence: a query sees only keys
        of the same document. A `DocumentMask` made of them once serves all layers. H must be a multiple of G; query head h reads key/value head h // (H // G).
        sinks_H: what `Sinks` returns, for these heads.
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


class CachedAttention(nn.Module):
    """Wrap an inner attention for generation: keep the keys and values of the positions seen so far.

    The first call takes the whole prompts. Of each later call the last token is new, and those before it are padding, which
    tensor parallelism needs to split the sequence.
    """

    def __init__(self, inner: InnerAttention) -> None:
        super().__init__()
        self.inner = inner
        self.k_BGTK: Tensor | None = None
        self.v_BGTK: Tensor | None = None
        self.ids_BT: Tensor | None = None

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output, (B, H, S, K), in later calls with zeros for the padding.

        document_ids_BS: another number for the padding on the left of prompts; None: all prompts are of one length.
        """
        last = slice(-self.inner.window, None)  # with no window: all
        ids_BS = document_ids_BS
        if self.k_BGTK is None or self.v_BGTK is None:
            # The prompts: nothing is cached yet, and the inner attention masks them.
            self.k_BGTK, self.v_BGTK = k_BGSK[:, :, last], v_BGSK[:, :, last]
            self.ids_BT = None if ids_BS is None else ids_BS[:, last]
            return self.inner(q_BHSK, k_BGSK, v_BGSK, ids_BS, sinks_H)
        self.k_BGTK = torch.cat([self.k_BGTK, k_BGSK[:, :, -1:]], dim=2)[:, :, last]
        self.v_BGTK = torch.cat([self.v_BGTK, v_BGSK[:, :, -1:]], dim=2)[:, :, last]
        mask_B1T = None
        if self.ids_BT is not None and ids_BS is not None:
            self.ids_BT = torch.cat([self.ids_BT, ids_BS[:, -1:]], dim=1)[:, last]
            mask_B1T = (self.ids_BT == ids_BS[:, -1:])[:, None]
        # The newest token sees all that is kept, except padding.
        q_BH1K, scale = q_BHSK[:, :, -1:], self.inner.scale
        if sinks_H is not None:
            whole = {"spec": AttentionSpec(causal=False), "scale": scale, "mask_BST": mask_B1T}
            out_BH1K = attend_with_sinks(q_BH1K, self.k_BGTK, self.v_BGTK, sinks_H, **whole)
        else:
            has_mask = mask_B1T is not None
            k_BGTK, v_BGTK = match_heads(q_BH1K, self.k_BGTK, self.v_BGTK, has_mask=has_mask)
            out_BH1K = F.scaled_dot_product_attention(
                q_BH1K,
                k_BGTK,
                v_BGTK,
                attn_mask=mask_B1T[:, None] if mask_B1T is not None else None,
                scale=scale,
                enable_gqa=q_BHSK.shape[1] != k_BGTK.shape[1],
            )
        return F.pad(out_BH1K, (0, 0, q_BHSK.shape[2] - 1, 0))
