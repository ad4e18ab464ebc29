"""Attention mask of packed documents, made once for a forward pass, in the form for the device's kernels.

    varlen  FlashAttention over documents as sequences: it computes no score outside of them. In 16 bits on GPUs
    flex    FlexAttention, compiled: it skips fully masked blocks of 128 x 128, and takes any dtype and any layout
    dense   one boolean for each query and key. On CPUs, and on GPUs that have neither
    ring    the document ids: ring.py makes a dense mask of each block of keys that arrives

An example: a batch of one sequence of S = 8 tokens with documents of 3, 4 and 1 tokens has the ids [0, 0, 0, 1, 1, 1, 1, 2]. Its
cu_seqlens are [0, 3, 7, 8]. The query at position 4 sees the keys 3 and 4.

`share_document_mask` makes the mask at the start of a model's forward pass. All attention modules then get the same
`DocumentMask` in place of the ids. An attention module that is called with ids makes a dense mask itself.

The host never reads ids back from the device: `document_cu_seqlens`, which the loader calls on the host, counts the documents.

B batch, S queries, T keys, H query heads, G key/value heads, K head dim, N documents of a sequence, Q and C blocks of queries and
keys
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest

from .attention_sinks import add_sinks, attend_with_sinks
from .block_attention import (
    CAUSAL,
    AttentionSpec,
    attend,
    match_heads,
    whole_rows,
)
from .module_kinds import MaskedAttention, SequenceModule, modules_of
from .torch_compat import compute_capability

MaskForm = Literal["varlen", "flex", "dense", "ring"]

_BLOCK = 128  # FlexAttention's default, which its kernels' tiles divide
# Sequences have room for documents of this mean length. Unused room costs FlashAttention empty blocks of its grid.
_MEAN_LENGTH = 256


@dataclass(frozen=True)
class DocumentMask:
    """Attention mask of packed documents, further limited by causality and window (`AttentionSpec`).

    Attributes:
        form: form of the mask, see the module's docstring.
        mask: "varlen": cu_seqlens of the flattened batch, int32 (B * N + 1,). "flex": a BlockMask for each spec of the model.
            "dense": booleans (B, 1, S, T) for each spec. "ring": ids of the positions of all ranks, (B, ranks, S).
        length: S, the upper limit of a document's length.
        starts_BS: whether a document starts at a position of this rank, for linear attention (linear_attention.py). None: the model has none.
    """

    form: MaskForm
    mask: Any
    length: int
    starts_BS: Tensor | None = None

    def attend(
        self,
        q_BHSK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        *,
        scale: float | None,
        spec: AttentionSpec = CAUSAL,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output. Query head h reads key/value head h // (H // G).

        Args:
            q_BHSK: queries.
            k_BGTK: keys.
            v_BGTK: values. Their heads may be smaller than those of keys.
            scale: None is 1 / sqrt(K).
            spec: one of the specs for which the mask was made.
            sinks_H: a logit of each head that joins the softmax, with the value zero.

        Returns:
            The output, (B, H, S, size of a value).
        """
        qkv, grouped = (q_BHSK, k_BGTK, v_BGTK), q_BHSK.shape[1] != k_BGTK.shape[1]
        if self.form == "flex":
            options = {"block_mask": self.mask[spec], "spec": spec}
            options |= {"scale": scale, "enable_gqa": grouped}
            if sinks_H is None:
                return flex_attention(*qkv, **options)
            out_BHSK, aux = flex_attention(*qkv, **options, return_aux=AuxRequest(lse=True))
            return add_sinks(out_BHSK, aux.lse, sinks_H)[0]
        if sinks_H is not None:
            is_dense = self.form == "dense"
            seen = {"mask_BST": self.mask[spec][:, 0]} if is_dense else {"ends": self.mask}
            return attend_with_sinks(*qkv, sinks_H, spec=spec, scale=scale, **seen)
        if self.form == "dense":
            qkv = q_BHSK, *match_heads(*qkv, has_mask=True)
            grouped = q_BHSK.shape[1] != qkv[1].shape[1]
            return F.scaled_dot_product_attention(
                *qkv, attn_mask=self.mask[spec], scale=scale, enable_gqa=grouped
            )
        size, v_size = q_BHSK.shape[-1], v_BGTK.shape[-1]
        # FlashAttention wants one size of heads. The zeros that pad the values become zeros that pad the output.
        v_BGTK = F.pad(v_BGTK, (0, size - v_size)) if v_size < size else v_BGTK
        out, _ = attend(q_BHSK, k_BGTK, v_BGTK, ends=self.mask, spec=spec, scale=scale)
        return out[..., :v_size]


def choose_form(device_type: str, dtype: torch.dtype, *, whole: bool = True) -> MaskForm:
    """Return the fastest form of a mask.

    Args:
        device_type: type of the device, such as "cuda".
        dtype: dtype of queries.
        whole: each rank attends to whole sequences.
    """
    # FlashAttention needs 8.0. So does Triton, to which FlexAttention is compiled, for all its features.
    if compute_capability(device_type) < (8, 0):
        return "dense"
    return "varlen" if whole and dtype in (torch.bfloat16, torch.float16) else "flex"


def document_cu_seqlens(ids_BS: Tensor) -> Tensor:
    """Return the end of each document within its sequence, int32 (B, N), padded with S.

    N has room for documents with a mean length of 256 tokens, or for two, four, eight ... times as many. It hardly ever changes, so
    that compiled code stays valid.

    Args:
        ids_BS: document ids on the host, which count up from 0 in each sequence.
    """
    length = ids_BS.shape[1]
    room = -(-length // _MEAN_LENGTH)
    while room <= int(ids_BS.max()):
        room *= 2
    numbers = torch.arange(room).repeat(len(ids_BS), 1)
    return torch.searchsorted(ids_BS.contiguous(), numbers, right=True, out_int32=True)


def mask_of(
    ids_BS: Tensor,
    *,
    form: MaskForm = "dense",
    cu_seqlens_BN: Tensor | None = None,
    keys: tuple[Tensor, Tensor, Tensor] | None = None,
    specs: Iterable[AttentionSpec] = (CAUSAL,),
) -> DocumentMask:
    """Return the mask of packed documents.

    Args:
        ids_BS: document ids, int64 (B, S), on the device of the mask.
        form: form of the mask.
        cu_seqlens_BN: result of `document_cu_seqlens`, for "varlen". None: the host waits for the ids, to compute it.
        keys: if keys are not at the queries' positions: the document ids of keys, (B, T), and the positions of queries, (S,), and
            keys, (T,).
        specs: specs of all layers that will use the mask.
    """
    length = ids_BS.shape[1]
    if form == "varlen":
        assert keys is None, "sequences are whole"
        if cu_seqlens_BN is None:
            cu_seqlens_BN = document_cu_seqlens(ids_BS.cpu()).to(ids_BS.device)
        starts_B1 = torch.arange(
            len(cu_seqlens_BN), dtype=torch.int32, device=cu_seqlens_BN.device
        )[:, None]
        return DocumentMask(
            form, F.pad((starts_B1 * length + cu_seqlens_BN).flatten(), (1, 0)), length
        )
    if keys is None:
        positions = torch.arange(length, device=ids_BS.device)
        keys = ids_BS, positions, positions
    ids_BT, at_S, at_T = keys
    if form == "flex":
        masks = {spec: _block_mask(ids_BS, ids_BT, at_S, at_T, spec) for spec in specs}
        return DocumentMask(form, masks, length)
    same_BST = ids_BS[:, :, None] == ids_BT[:, None, :]
    masks = {spec: (same_BST & spec.sees(at_S[:, None], at_T))[:, None] for spec in specs}
    return DocumentMask(form, masks, length)


def mask_of_window(q_BHSK: Tensor, spec: AttentionSpec) -> DocumentMask:
    """Return the mask of sequences of one document each, for queries and keys at the same positions.

    It is a mask of S x S booleans only if no kernel takes another form.

    Args:
        q_BHSK: queries, which determine shapes, dtype and device.
        spec: keys that a query sees.
    """
    batch, length, device = q_BHSK.shape[0], q_BHSK.shape[2], q_BHSK.device
    form = choose_form(device.type, q_BHSK.dtype)
    if form == "varlen":
        return DocumentMask(form, whole_rows(batch, length, device), length)
    ids_BS = torch.zeros(
        1 if form == "dense" else batch, length, dtype=torch.int64, device=device
    )
    return mask_of(ids_BS, form=form, specs=(spec,))


def _block_mask(
    ids_BS: Tensor, ids_BT: Tensor, at_S: Tensor, at_T: Tensor, spec: AttentionSpec
) -> Any:
    """Return FlexAttention's mask from the ranges of ids and positions in each block, so that no S x T mask is in memory."""
    from torch.nn.attention.flex_attention import BlockMask

    def visible(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids_BS[b, query] == ids_BT[b, key]) & spec.sees(at_S[query], at_T[key])

    (low_BQ1, high_BQ1), (low_BC, high_BC) = _ranges(ids_BS), _ranges(ids_BT)
    (first_Q1, last_Q1), (first_C, last_C) = _ranges(at_S), _ranges(at_T)
    low_BQ1, high_BQ1, first_Q1, last_Q1 = (
        x[..., None] for x in (low_BQ1, high_BQ1, first_Q1, last_Q1)
    )
    low_BC, high_BC = low_BC[:, None], high_BC[:, None]
    # Ranges that overlap may contain no visible pair. The block is then computed and masked, like a partly visible one.
    some_BQC = (low_BQ1 <= high_BC) & (low_BC <= high_BQ1)
    all_BQC = (low_BQ1 == high_BC) & (low_BC == high_BQ1)
    if spec.causal:
        some_BQC = some_BQC & (last_Q1 >= first_C)
        all_BQC = all_BQC & (first_Q1 >= last_C)
    if spec.window:
        some_BQC = some_BQC & (first_Q1 - last_C < spec.window)
        all_BQC = all_BQC & (last_Q1 - first_C < spec.window)
    blocks = [*_listed(some_BQC & ~all_BQC), *_listed(all_BQC)]
    lengths = ids_BS.shape[1], ids_BT.shape[1]
    return BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value in each block of the last dimension. The last block may be shorter."""
    length = x.shape[-1]
    places = torch.arange(-(-length // _BLOCK) * _BLOCK, device=x.device).clamp(max=length - 1)
    low, high = torch.aminmax(x[..., places].unflatten(-1, (-1, _BLOCK)), dim=-1)
    return low, high


def _listed(is_in_BQC: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the number of key blocks and their indices, with a dimension for heads.

    The indices of the blocks that are in the mask come first, in order.
    """
    order = is_in_BQC.int().argsort(dim=-1, descending=True, stable=True)
    return is_in_BQC.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def share_document_mask(model: nn.Module, make: Callable[..., DocumentMask] = mask_of) -> None:
    """Register a pre-forward hook that builds the document mask once and passes it to every attention module.

    The hook replaces the argument `document_ids_BS` of the model's forward by a mask, and removes the argument `cu_seqlens_BN`. The
    specs of the mask come from all modules with an attribute `spec`, and the starts of documents from a `SequenceModule`.

    Args:
        model: the model.
        make: called as `make(ids, cu_seqlens_BN=..., specs=...)`.
    """
    found = {module.spec for module in modules_of(model, MaskedAttention).values()}
    specs = tuple(sorted(found)) or (CAUSAL,)
    linear = [*modules_of(model, SequenceModule).values()]

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cu_seqlens_BN = kwargs.pop("cu_seqlens_BN", None)
        if isinstance(ids_BS := kwargs.get("document_ids_BS"), Tensor):
            mask = make(ids_BS, cu_seqlens_BN=cu_seqlens_BN, specs=specs)
            if linear:
                mask = replace(mask, starts_BS=linear[0].starts(ids_BS))
            kwargs["document_ids_BS"] = mask
        return args, kwargs

    model.register_forward_pre_hook(before, with_kwargs=True)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, **options: Any
) -> Any:
    """Call FlexAttention, compiled. Uncompiled, it would keep all scores in memory.

    On a CPU it runs uncompiled, since the compiled one has no backward pass there.

    Args:
        q: queries, (B, H, S, K).
        k: keys, (B, G, T, K).
        v: values, (B, G, T, size of a value).
        spec: spec of the mask. Only the simulator reads it.
        **options: further arguments of FlexAttention.
    """
    from torch.nn.attention import flex_attention as module

    # Within a compiled block, it is compiled as a part of the block.
    as_is = torch.compiler.is_compiling() or q.device.type == "cpu"
    return (module.flex_attention if as_is else _compiled_flex())(q, k, v, **options)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
