"""Attention against a plain formula, in every form of its mask; a cache gives what the whole sequence gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.attention import plain_formula
from tests.support.tables import tabled
from titan.models.common.attention import InnerAttention
from titan.parallel import block_attention, documents
from titan.parallel.block_attention import AttentionSpec, attend, attend_backward
from titan.parallel.documents import MaskForm, document_cu_seqlens, mask_of
from titan.tools.generation import CachedAttention

BATCH, LENGTH = 2, 150  # more than a block of FlexAttention, and no multiple of it
SIGHTS = [
    AttentionSpec(),
    AttentionSpec(window=7),
    AttentionSpec(window=140),
    AttentionSpec(causal=False),
]


def inputs(dtype: torch.dtype, *, has_sinks: bool) -> list[Tensor]:
    """Return queries, keys, values and, if there are some, sinks."""
    generator = torch.Generator().manual_seed(3)
    # The kernels that give out the logsumexp want one size of heads.
    sizes = ((4, 16), (2, 16), (2, 16 if has_sinks else 8))
    shapes: list[tuple[int, ...]] = [(BATCH, heads, LENGTH, size) for heads, size in sizes]
    shapes += [(4,)] * has_sinks
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def document_ids() -> Tensor:
    starts = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.05
    starts[:, 0] = False
    return starts.cumsum(1)


def with_gradients(attend: Any, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    out.backward(torch.sin(torch.arange(out.numel())).view_as(out).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def varlen_mask(ends: Tensor, spec: AttentionSpec) -> Tensor:
    at = torch.arange(int(ends[-1]))
    ids = torch.searchsorted(ends, at, right=True)
    return (ids[:, None] == ids) & spec.sees(at[:, None], at)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ends: Tensor,
    length: int,
    spec: AttentionSpec,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Stand for FlashAttention of packed sequences, which has no CPU form: by the kernel of a CPU, with documents as a mask."""
    assert ends.diff().max() <= length
    qkv = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mask = varlen_mask(ends, spec)[None]
    with torch.no_grad():
        out, lse = attend(qkv[0], qkv[1], qkv[2], spec=spec, scale=scale, mask_BST=mask)
    if q.requires_grad:  # and torch knows the gradient
        k, v = (x.repeat_interleave(2, dim=1) for x in qkv[1:])
        out = F.scaled_dot_product_attention(qkv[0], k, v, mask, scale=scale)
    return out[0].transpose(0, 1), lse[0]


def varlen_backward(
    *rows: Tensor, lse: Tensor, ends: Tensor, length: int, spec: AttentionSpec, scale: float
) -> list[Tensor]:
    grad, q, k, v, out = (x.transpose(0, 1)[None] for x in rows)
    how = {"spec": spec, "scale": scale, "mask_BST": varlen_mask(ends, spec)[None]}
    gradients = attend_backward(grad, q, k, v, out, lse[None], **how)
    return [x[0].transpose(0, 1) for x in gradients]


@pytest.mark.parametrize("form", ["dense", "varlen"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spec", SIGHTS)
def test_equals_the_formula(
    spec: AttentionSpec,
    packed: bool,
    has_sinks: bool,
    form: MaskForm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and the gradients of queries, keys, values and sinks. Varlen is what surrounds the kernel of a GPU."""
    monkeypatch.setattr(block_attention, "varlen_attention", varlen_attention)
    monkeypatch.setattr(block_attention, "varlen_backward", varlen_backward)
    monkeypatch.setattr(documents, "choose_form", lambda *_: form)
    attention = InnerAttention(scale=0.3, window=spec.window, causal=spec.causal)
    ids = document_ids() if packed else None
    mask = ids
    if ids is not None and form == "varlen":
        mask = mask_of(ids, form=form, cu_seqlens_BN=document_cu_seqlens(ids), specs=(spec,))
    leaves = inputs(torch.float64, has_sinks=has_sinks)
    ours = with_gradients(lambda q, k, v, *sinks: attention(q, k, v, mask, *sinks), leaves)
    theirs = with_gradients(
        lambda q, k, v, s=None: plain_formula(q, k, v, spec=spec, ids=ids, sinks=s, scale=0.3),
        leaves,
    )
    assert len(ours) == 4 + has_sinks
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_to_the_same(packed: bool) -> None:
    """One code for layers of different specs. torch 2.11 gave wrong gradients until the output with sinks became a copy."""
    *qkv, sinks = inputs(torch.float32, has_sinks=True)
    mask = mask_of(document_ids(), specs=SIGHTS) if packed else None
    for spec in (SIGHTS[0], SIGHTS[1], SIGHTS[3]):
        attention = InnerAttention(window=spec.window, causal=spec.causal)

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            return attention(q, k, v, mask, sinks)  # noqa: B023

        expected = with_gradients(attend, [*qkv, sinks])
        attention.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(with_gradients(attend, [*qkv, sinks]), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spec", SIGHTS)
def test_flex_equals_the_formula(spec: AttentionSpec, packed: bool, has_sinks: bool) -> None:
    """Without gradients, which FlexAttention has none of on a CPU."""
    q, k, v, *sinks = inputs(torch.float32, has_sinks=has_sinks)
    ids = document_ids() if packed else torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mask = mask_of(ids, form="flex", specs=SIGHTS)
    attention = InnerAttention(window=spec.window, causal=spec.causal)
    expected = plain_formula(q, k, v, spec=spec, ids=ids, sinks=sinks[0] if sinks else None)
    torch.testing.assert_close(attention(q, k, v, mask, *sinks), expected, rtol=1e-5, atol=1e-5)


def test_blocks_outside_of_the_window_are_left_out() -> None:
    ids = torch.zeros(1, 512, dtype=torch.int64)
    # A window of 129 reaches from a block's first query to the first key of the block before it.
    for window, kept in ((129, [1, 2, 2, 2]), (130, [1, 2, 3, 3]), (1, [1, 1, 1, 1])):
        [mask] = mask_of(ids, form="flex", specs=(AttentionSpec(window=window),)).mask.values()
        blocks = mask.kv_num_blocks + mask.full_kv_num_blocks
        assert blocks.tolist() == [[kept]], window


def test_a_window_without_causality_is_refused() -> None:
    q, k, v = inputs(torch.float32, has_sinks=False)
    with pytest.raises(ValueError, match="window of 3 needs attention that is causal"):
        InnerAttention(window=3, causal=False)(q, k, v)


@pytest.mark.parametrize("has_sinks", [False, True])
@tabled("value_size, scale, window")
def test_cache_equals_whole_sequence(
    value_size: int, scale: float | None, window: int, has_sinks: bool
) -> None:
    if has_sinks:
        value_size = 16  # the kernels that give out the logsumexp want one size
    q, k = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 10, 16)
    v = torch.randn(1, 2, 10, value_size)
    sinks = (None, torch.randn(4)) if has_sinks else ()
    whole = InnerAttention(scale=scale, window=window)(q, k, v, *sinks)
    cached = CachedAttention(InnerAttention(scale=scale, window=window))
    parts = [cached(q[:, :, :6], k[:, :, :6], v[:, :, :6], *sinks)]
    parts += [cached(*(x[:, :, i : i + 1] for x in (q, k, v)), *sinks) for i in range(6, 10)]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)
    assert cached.k_BGTK is not None and cached.k_BGTK.shape[2] == (window or 10)
