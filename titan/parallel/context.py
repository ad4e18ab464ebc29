"""Context parallelism: each rank of the cp axis holds a part of every sequence, and only attention communicates.

The caller splits all tensors with a sequence dimension (tokens, labels, positions, document ids) with `shard_sequence`.
`apply_cp` replaces every attention module by a `ContextParallelAttention`, which takes local queries, keys and values and
returns the local part of attention over the whole sequence. Modules of the class `SequenceModule` (documents.py) connect their
parts themselves. Attention has three methods, all exact:

    ring       keys and values travel from rank to rank behind the computation (ring.py): needs the least memory, and is the
               only method whose transfers hide completely; for long sequences
    allgather  all keys and values at once (ring.py): for grouped heads, whose keys and values are few
    ulysses    DeepSpeed Ulysses (arXiv:2309.14509): two all-to-alls trade sequence for heads, so that a rank runs the
               wrapped attention over the whole sequence for its share of heads; at most as many ranks as heads

Ulysses calls the wrapped attention, of any kind. The other methods compute softmax attention in its place, with the module's
`scale` (1/sqrt(K) by default) and `spec` (block_attention.py, causal by default). They require that its class declares
`is_causal_softmax = True`. Sinks are an argument of the call.

Causal attention has more work for later positions. `balanced` gives each rank an early and a late chunk (head and
tail, see ring.py) instead of one contiguous part. Ring and allgather need it to be fast; Ulysses does not.

B batch, S local positions, T all positions, H query heads, G key/value heads, K head dim, C ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .block_attention import CAUSAL, AttentionSpec
from .collectives import all_gather, all_to_all
from .documents import DocumentMask, MaskForm, mask_of
from .module_kinds import (
    MaskedAttention,
    ScaledAttention,
    SequenceModule,
    is_kind,
    modules_of,
)
from .ring import SequencePart, chunks_held, ring_attention

Method = Literal["ring", "allgather", "ulysses"]


def apply_cp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    attention_type: type[nn.Module],
    method: Method = "allgather",
    balanced: bool = True,
) -> None:
    """Replace each `attention_type` in `model`, in place, by a module that works on parts of the sequence.

    Each `SequenceModule` (linear_attention.py) stays, and gets this rank's part.

    Args:
        model: the model.
        mesh: mesh with the cp axis only.
        attention_type: attention without parameters, called as forward(q_BHSK, k_BGSK, v_BGSK, document_ids_BS=None, sinks_H=None),
            by position or by these names.
        method: "ring", "allgather" or "ulysses".
        balanced: the caller gives each rank a head and a tail of the sequence.

    Raises:
        ValueError: the method is unknown, the model has no module of either kind, or ring or allgather may not replace a module.
    """
    if method not in get_args(Method):
        raise ValueError(
            f"context parallel method {method!r}: must be one of {get_args(Method)}"
        )
    # Functional collectives know a group by its name, which a compiler can put into a graph.
    part = sequence_part(mesh, balanced=balanced)
    attentions = [
        (parent, name, child, f"{prefix}.{name}".lstrip("."))
        for prefix, parent in model.named_modules()
        for name, child in parent._modules.items()  # named_children() has each child once
        if isinstance(child, attention_type)
    ]
    linear = modules_of(model, SequenceModule).values()
    if not attentions and not linear:
        raise ValueError(
            f"context parallelism found no {attention_type.__name__} in {type(model).__name__}"
        )
    for module in linear:
        module.hold(part)
    for kind in {type(child) for _, _, child, _ in attentions} if method != "ulysses" else ():
        # Ask the class itself: a derived class may compute another function.
        if not vars(kind).get("is_causal_softmax"):
            raise ValueError(
                f"context parallelism by {method} computes causal softmax attention with `scale`, else 1/sqrt(head size), "
                f"and with the window of `spec`, without bias or soft cap, in place of {kind.__name__}: if that is what it computes, say "
                "`is_causal_softmax = True` in its class; else use the method 'ulysses', which calls it"
            )
    for parent, name, child, path in attentions:
        parallel = ContextParallelAttention(child, part=part, method=method, name=path)
        setattr(parent, name, parallel)


def shard_sequence(tensor: Tensor, *, dim: int, rank: int, size: int, balanced: bool) -> Tensor:
    """Return the part of a rank.

    Args:
        tensor: whole sequences along `dim`.
        dim: dimension of the sequence.
        rank: rank along the cp axis.
        size: number of ranks along the cp axis.
        balanced: the part is a head and a tail, and not contiguous.

    Raises:
        ValueError: the length does not divide by `size`, or by 2 x size if balanced.
    """
    check_divides(tensor.shape[dim], size=size, balanced=balanced)
    # Each rank holds two chunks if balanced, else one.
    order = chunks_held(size, balanced)
    held = order[rank * len(order) // size : (rank + 1) * len(order) // size]
    return _pick(tensor, dim, held, len(order))


def unshard_sequence(tensor: Tensor, *, dim: int, size: int, balanced: bool) -> Tensor:
    """Return whole sequences from the parts of all ranks.

    Args:
        tensor: the parts of all ranks, concatenated along `dim` in the order of ranks.
        dim: dimension of the sequence.
        size: number of ranks along the cp axis.
        balanced: each part is a head and a tail.
    """
    order = chunks_held(size, balanced)
    # The place of each chunk of the sequence in the joined parts.
    return _pick(tensor, dim, [order.index(chunk) for chunk in range(len(order))], len(order))


def check_divides(length: int, *, size: int, balanced: bool) -> None:
    """Raise ValueError, with the nearest lengths that divide, if a sequence cannot be split.

    Args:
        length: length of the sequence.
        size: number of ranks along the cp axis.
        balanced: each part is a head and a tail.

    Raises:
        ValueError: the length does not divide by `size`, or by 2 x size if balanced.
    """
    multiple = 2 * size if balanced else size
    below = length // multiple * multiple
    if below != length:
        near = f"{below} or {below + multiple}" if below else f"{multiple}"
        why = "2 x ranks, a head and a tail for each" if balanced else "the number of ranks"
        raise ValueError(
            f"a sequence of {length} cannot be split over {size} context parallel ranks: its length must be"
            f" a multiple of {multiple} ({why}); try {near}"
        )


class ContextParallelAttention(nn.Module):
    """Attention over the whole sequence, from and to this rank's part of it (see the module's docstring).

    Attributes:
        inner: the attention module that this module replaces.
        scale: factor of the scores. None: 1 / sqrt(K).
        spec: keys that a query sees.
        name: name of the module, for messages.
        part: the part of the sequence that this rank holds.
        method: "ring", "allgather" or "ulysses".
    """

    def __init__(
        self, inner: Any, *, part: SequencePart, method: Method, name: str = "attention"
    ) -> None:
        super().__init__()
        self.inner = inner
        self.scale: float | None = inner.scale if is_kind(inner, ScaledAttention) else None
        self.spec: AttentionSpec = inner.spec if is_kind(inner, MaskedAttention) else CAUSAL
        self.name = name
        self.part = part
        self.method: Method = method

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: Tensor | DocumentMask | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the local output, (B, H, S, size of a value).

        Args:
            q_BHSK: local queries.
            k_BGSK: local keys.
            v_BGSK: local values. Their heads may be smaller than those of keys.
            document_ids_BS: document ids of the local positions, or the mask of `mask_over_ranks`.
            sinks_H: a logit of each head that joins the softmax, with the value zero.

        Raises:
            ValueError: sizes of heads do not fit each other, or Ulysses cannot split the heads over the ranks.
        """
        size, v_size = q_BHSK.shape[-1], v_BGSK.shape[-1]
        if size != k_BGSK.shape[-1] or size < v_size:
            raise ValueError(
                f"{self.name}: heads of queries, keys and values have sizes {size}, {k_BGSK.shape[-1]}, {v_size}; "
                "those of queries and keys must be equal, and values no larger"
            )
        if size == v_size:
            return self._attend(q_BHSK, k_BGSK, v_BGSK, document_ids_BS, sinks_H)
        # Keys and values travel in one tensor. The zeros that pad the values become zeros that pad the output.
        v_BGSK = F.pad(v_BGSK, (0, size - v_size))
        return self._attend(q_BHSK, k_BGSK, v_BGSK, document_ids_BS, sinks_H)[..., :v_size]

    def _attend(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: Tensor | DocumentMask | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        mask = document_ids_BS
        if self.method == "ulysses":
            # The wrapped attention may be a user's class. If the caller passed ids, it gets ids.
            mask = _whole_ids(mask, self.part) if isinstance(mask, Tensor) else mask
            return self._ulysses(q_BHSK, k_BGSK, v_BGSK, mask, sinks_H)
        if isinstance(mask, Tensor):
            specs = (self.spec,)
            mask = mask_over_ranks(mask, part=self.part, method=self.method, specs=specs)
        options: Any = {"scale": self.scale, "spec": self.spec, "sinks_H": sinks_H}
        gather, part = self.method == "allgather", self.part
        if mask is None or not gather:
            ids_BCS = None if mask is None else mask.mask
            options |= {"part": part, "gather": gather, "ids_BCS": ids_BCS}
            return ring_attention(q_BHSK, k_BGSK, v_BGSK, **options)
        # A mask over all keys, in the order in which ranks hold them: (2, B, G, S, K) -> (C, 2, B, G, S, K)
        kv = all_gather(torch.stack([k_BGSK, v_BGSK]), group=part.group, size=part.size)
        # Sources become part of the key dimension, (2, B, G, C x S, K). Then split keys and values.
        k_BGTK, v_BGTK = kv.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).unbind(0)
        return mask.attend(q_BHSK, k_BGTK, v_BGTK, **options)

    def _ulysses(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        mask: Tensor | DocumentMask | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        size, balanced = self.part.size, self.part.balanced
        heads, groups = q_BHSK.shape[1], k_BGSK.shape[1]
        if heads % size:
            raise ValueError(
                f"Ulysses deals out {heads} query heads (of this tensor-parallel rank) to {size} context parallel"
                f" ranks: their number must be a multiple of it; use the method 'ring' or 'allgather'"
            )
        # With fewer key/value heads than ranks, or an uneven number, copy heads until each rank gets whole heads.
        copies = math.lcm(groups, size) // groups
        if copies > 1:
            k_BGSK, v_BGSK = (x.repeat_interleave(copies, dim=1) for x in (k_BGSK, v_BGSK))
        per_rank = [x.unflatten(1, (size, -1)) for x in (q_BHSK, k_BGSK, v_BGSK)]
        # One all-to-all for all three, (C, B, (H + 2G) / C, S, K): C indexes shares of heads before it, parts of T after it.
        parts = all_to_all(torch.cat(per_rank, dim=2).movedim(1, 0), group=self.part.group)
        whole = parts.movedim(0, 2).flatten(2, 3)
        whole = unshard_sequence(whole, dim=2, size=size, balanced=balanced)
        # An attention without sinks may not have the argument.
        sinks = () if sinks_H is None else (sinks_H.chunk(size)[self.part.rank],)
        qkv = whole.split([x.shape[2] for x in per_rank], dim=1)
        out_BHTK = self.inner(*qkv, mask, *sinks)
        # Back to the order in which ranks hold chunks, before the all-to-all.
        order = chunks_held(size, balanced)
        out_BHTK = _pick(out_BHTK, 2, order, len(order))
        # (C, B, H / C, S, K): C indexes parts of T before it, shares of heads after it.
        shares = all_to_all(
            out_BHTK.unflatten(2, (size, -1)).movedim(2, 0), group=self.part.group
        )
        return shares.movedim(0, 1).flatten(1, 2)


def sequence_part(mesh: DeviceMesh, *, balanced: bool) -> SequencePart:
    """Return the part of each sequence that this rank of the cp axis holds.

    Args:
        mesh: mesh with the cp axis only.
        balanced: the part is a head and a tail, and not contiguous.
    """
    # Functional collectives know a group by its name, which a compiler can put into a graph.
    return SequencePart(
        mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), balanced
    )


def mask_over_ranks(
    ids_BS: Tensor,
    *,
    part: SequencePart,
    method: Method,
    form: MaskForm = "dense",
    cu_seqlens_BN: Tensor | None = None,
    specs: Iterable[AttentionSpec] = (CAUSAL,),
) -> DocumentMask:
    """Return the document mask for a rank's attention, from the ids of its part of the sequence.

    Args:
        ids_BS: document ids of the local positions.
        part: the part of the sequence that this rank holds.
        method: "ring", "allgather" or "ulysses".
        form: form of the mask (documents.py). Only Ulysses takes "varlen".
        cu_seqlens_BN: result of `document_cu_seqlens` for whole sequences, for "varlen".
        specs: specs of all layers that will use the mask.
    """
    if method == "ulysses":
        return mask_of(
            _whole_ids(ids_BS, part), form=form, cu_seqlens_BN=cu_seqlens_BN, specs=specs
        )
    length, order = ids_BS.shape[1], chunks_held(part.size, part.balanced)
    ids_BT = _gather_ids(ids_BS, part)
    if method == "ring":
        return DocumentMask("ring", ids_BT.unflatten(1, (part.size, length)), length)
    positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    positions_T = _pick(positions_T, 0, order, len(order))
    positions_S = positions_T[part.rank * length : (part.rank + 1) * length]
    return mask_of(ids_BS, form=form, keys=(ids_BT, positions_S, positions_T), specs=specs)


def _gather_ids(ids_BS: Tensor, part: SequencePart) -> Tensor:
    """Return all ranks' ids, (B, T), in the order of ranks."""
    ids_CBS = all_gather(ids_BS, group=part.group, size=part.size)
    return ids_CBS.movedim(0, 1).flatten(1, 2)


def _whole_ids(ids_BS: Tensor, part: SequencePart) -> Tensor:
    """Return all ranks' ids, (B, T), in the order of the sequence."""
    ids_BT = _gather_ids(ids_BS, part)
    return unshard_sequence(ids_BT, dim=1, size=part.size, balanced=part.balanced)


def _pick(tensor: Tensor, dim: int, chunks: list[int], num_chunks: int) -> Tensor:
    """Return some of `num_chunks` equal chunks, concatenated.

    It uses views and cat, since an index would have to be moved to the device.
    """
    if chunks == list(range(num_chunks)):
        return tensor
    pieces = tensor.chunk(num_chunks, dim)
    return (
        pieces[chunks[0]] if len(chunks) == 1 else torch.cat([pieces[c] for c in chunks], dim)
    )
