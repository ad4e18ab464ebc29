"""Document masks in their three forms against each other, and that a forward pass makes one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tables import tabled
from titan.base.untrusted import InputError
from titan.models.common.attention import InnerAttention
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import block_attention, initialize
from titan.parallel.block_attention import CAUSAL
from titan.parallel.compile import apply_compile
from titan.parallel.documents import (
    document_cu_seqlens,
    mask_of,
    share_document_mask,
)

BATCH, LENGTH = 3, 300  # not a multiple of FlexAttention's 128


def document_ids(rate: float = 0.03) -> Tensor:
    starts = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < rate
    starts[:, 0] = False
    starts[0] = False  # one document
    return starts.cumsum(1)


def heads(v_size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((BATCH, 4, LENGTH, 16), (BATCH, 2, LENGTH, 16), (BATCH, 2, LENGTH, v_size))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rate", [0.0, 0.03])
def test_blocks_equal_a_dense_mask(rate: float) -> None:
    """Whole sequences, then keys and queries as ranks hold them: in another order, and fewer queries."""
    ids = document_ids(rate)
    q, k, v = (x.detach() for x in heads())
    dense, flex = mask_of(ids), mask_of(ids, form="flex")
    expected = dense.attend(q, k, v, scale=None)
    torch.testing.assert_close(flex.attend(q, k, v, scale=None), expected, rtol=1e-5, atol=1e-5)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))
    mine = order[:140]
    flex = mask_of(ids[:, mine], form="flex", keys=(ids[:, order], mine, order))
    out = flex.attend(q[:, :, mine], k[:, :, order], v[:, :, order], scale=None)
    torch.testing.assert_close(out, expected[:, :, mine], rtol=1e-5, atol=1e-5)


def test_blocks_that_are_masked_are_left_out() -> None:
    """Documents of 128 tokens: a block for each, all of them partly visible, and the diagonal alone."""
    ids = (torch.arange(512) // 128)[None]
    mask = mask_of(ids, form="flex").mask[CAUSAL]
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    # One document of 512: below the diagonal, blocks need no mask.
    mask = mask_of(0 * ids, form="flex").mask[CAUSAL]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]


def test_ends_leave_room_and_grow_by_doubling() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [0] * 8])
    assert document_cu_seqlens(ids).tolist() == [[2, 5, 8, 8], [8, 8, 8, 8]]
    assert document_cu_seqlens(torch.zeros(1, 1024, dtype=torch.int64)).tolist() == [[1024] * 4]
    # Rows begin where the rows before end.
    mask = mask_of(ids, form="varlen", cu_seqlens_BN=document_cu_seqlens(ids))
    assert mask.mask.tolist() == [0, 2, 5, 8, 8, 16, 16, 16, 16]
    assert mask.mask.dtype == torch.int32


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_pass_makes_one_mask(compiled: bool) -> None:
    """The logits are those of ids alone."""
    model = build_model(FLAVORS["tiny"])
    initialize(model, seed=0, std_of=model.init_std)
    ids = document_ids()
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 256
    expected = model(tokens, document_ids_BS=ids)
    if compiled:
        apply_compile(model, backend="eager", preserve_rng_state=False)
    made = []
    share_document_mask(model, lambda *a, **k: made.append(1) or mask_of(*a, **k))
    assert torch.equal(model(tokens, document_ids_BS=ids, cu_seqlens_BN=None), expected)
    assert torch.equal(model(tokens, document_ids_BS=ids), expected)
    assert len(made) == 2


def test_flash_attention_takes_the_mask_on_a_gpu() -> None:
    """By torch's descriptions of its kernels: shapes, layouts and gradients, with grouped heads and narrow values."""
    inputs = [
        torch.empty_like(x, device="meta", dtype=torch.bfloat16).requires_grad_()
        for x in heads(8)
    ]
    ends = torch.zeros(BATCH, 4, dtype=torch.int32, device="meta")
    mask = mask_of(document_ids().to("meta"), form="varlen", cu_seqlens_BN=ends)
    out = mask.attend(*inputs, scale=None)
    assert out.shape == (BATCH, 4, LENGTH, 8) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert [x.grad.shape for x in inputs if x.grad is not None] == [x.shape for x in inputs]


@pytest.mark.parametrize("form", [None, "dense"])
@pytest.mark.parametrize(
    ("capability", "dtype", "backend", "copies"),
    [
        ((0, 0), torch.float32, "auto", (False, False)),
        ((9, 0), torch.bfloat16, "auto", (False, False)),
        ((9, 0), torch.bfloat16, "flash", (False, True)),
        ((9, 0), torch.bfloat16, "efficient", (True, True)),
        ((9, 0), torch.bfloat16, "math", (False, False)),
        ((9, 0), torch.float32, "auto", (True, True)),
        ((9, 0), torch.float64, "auto", (False, False)),
        ((7, 5), torch.float16, "auto", (True, True)),
    ],
)
def test_key_and_value_heads_are_copied_where_torch_would_keep_all_scores(
    capability: list[int],
    dtype: torch.dtype,
    backend: str,
    copies: tuple[bool, bool],
    form: Literal["dense"] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """copies: without a mask, and with one, which FlashAttention does not take."""
    attend, seen = F.scaled_dot_product_attention, []
    qkv = [x.detach().to(dtype) for x in heads()]
    ids = document_ids() if form else None
    plain = InnerAttention()(*(x.double() for x in qkv), ids)

    def spy(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return attend(q.double(), k.double(), v.double(), enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(block_attention, "compute_capability", lambda _: capability)
    with ExitStack() as chosen:
        monkeypatch.setattr(block_attention, "_chosen", chosen)
        if backend != "auto":
            block_attention.prefer_backend(backend, "cuda")
        out = InnerAttention()(*qkv, ids)
    assert seen == [(4, 4, False) if copies[form == "dense"] else (2, 2, True)]
    torch.testing.assert_close(out, plain)


@tabled("version, capability, allowed, expected")
def test_the_ring_prefers_cudnn_where_torch_does(
    version: int | None,
    capability: list[int],
    allowed: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: tuple(capability))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: allowed)
    assert block_attention.cudnn_is_faster() == expected


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("auto", None),
        ("cudnn", {"cudnn", "flash", "mem_efficient", "math"}),
        ("flash", {"flash", "mem_efficient", "math"}),
        ("efficient", {"mem_efficient", "math"}),
        ("math", {"math"}),
    ],
)
def test_a_chosen_kernel_comes_first(
    name: str, allowed: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "compute_capability", lambda _: (9, 0))
    switches = ("cudnn", "flash", "mem_efficient", "math")
    before = {s: getattr(torch.backends.cuda, f"{s}_sdp_enabled")() for s in switches}
    with ExitStack() as chosen:
        monkeypatch.setattr(block_attention, "_chosen", chosen)
        block_attention.prefer_backend(name, "cuda")
        now = {s for s in switches if getattr(torch.backends.cuda, f"{s}_sdp_enabled")()}
        assert now == (allowed or {s for s, on in before.items() if on})
    assert {s: getattr(torch.backends.cuda, f"{s}_sdp_enabled")() for s in switches} == before


def test_a_kernel_that_is_not_there_is_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError, match='"flash" is a kernel of GPUs, and this is "cpu"'):
        block_attention.prefer_backend("flash", "cpu")
    monkeypatch.setattr(block_attention, "compute_capability", lambda _: (9, 0))
    with pytest.raises(
        InputError, match=r'"fa3": torch .* cannot load it .*; install it, or use'
    ):
        block_attention.prefer_backend("fa3", "cuda")
