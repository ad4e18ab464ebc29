"""What runs only on GPUs, under fake tensors of "cuda": schemas, shapes, dtypes and devices. No driver is needed, but a build with CUDA.
Forward passes only, of which the loss computes its gradients: torch's autograd engine asks the driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.losses import cross_entropy_sum
from titan.models.common.moe import Gate, grouped_matmuls
from titan.optim.clipping import clip_gradients
from titan.parallel import block_attention
from titan.parallel.block_attention import CAUSAL, AttentionSpec

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="needs a torch built with CUDA: fake tensors of one without it abort",
)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fake_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with FakeTensorMode():
        yield


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).requires_grad_()


def form(tensor: Tensor | None) -> tuple[Any, ...]:
    assert tensor is not None
    return tuple(tensor.shape), tensor.dtype, tensor.device.type


def check_block(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    out, lse = block_attention.attend(q, k, v, scale=None, **options)
    assert (form(out), form(lse)) == (form(q), ((2, 4, 75), FP32, "cuda"))
    grads = block_attention.attend_backward(out, q, k, v, out, lse, scale=None, **options)
    assert [form(grad) for grad in grads] == [form(x) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("dtype", "size", "version", "kernel"),
    [
        (BF16, 64, 91501, "cudnn"),
        (BF16, 64, 91000, "flash"),
        (BF16, 192, 91501, "flash"),
        (FP32, 64, 91501, "efficient"),
    ],
)
@pytest.mark.parametrize("groups", [4, 2])
def test_the_ring_s_kernels(
    dtype: torch.dtype,
    size: int,
    version: int,
    kernel: str,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    q, k, v = (rand(2, heads, 75, size, dtype=dtype).detach() for heads in (4, groups, groups))
    with monkeypatch.context() as patch:  # with it, fake tensors would start the driver
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert block_attention.choose_kernel(q) == kernel
    monkeypatch.setattr(block_attention, "choose_kernel", lambda _, masked=False: kernel)
    check_block(q, k, v, spec=CAUSAL)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (None, BF16),
        (None, FP32),
        (AttentionSpec(window=16), BF16),
        (AttentionSpec(), BF16),
        (AttentionSpec(causal=False), BF16),
    ],
)
def test_the_ring_with_a_mask_and_sequences_with_the_logsumexp(
    spec: AttentionSpec | None, dtype: torch.dtype
) -> None:
    """As the ring's own block has them with a window, and sinks with packed documents. None: with a mask."""
    q, k, v = (rand(2, heads, 75, 64, dtype=dtype).detach() for heads in (4, 2, 2))
    if spec is None:
        mask = torch.empty(2, 75, 75, device="cuda", dtype=torch.bool)
        check_block(q, k, v, spec=CAUSAL, mask_BST=mask)
    else:
        ends = block_attention.whole_rows(2, 75, q.device)
        check_block(q, k, v, spec=spec, ends=ends)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_loss(dtype: torch.dtype) -> None:
    if dtype == BF16:
        try:
            torch.mm(rand(8, 8), rand(8, 8), out_dtype=FP32)
            one = rand(8, 8).detach()
            torch.addmm(one.float(), one, one, out_dtype=FP32)
        except (RuntimeError, TypeError) as error:
            pytest.skip(f"fake tensors of torch {torch.__version__} have no addmm(out_dtype): {error}"[:150])  # fmt: skip
    x, weight = rand(2, 24, 32, dtype=dtype), rand(64, 32, dtype=dtype)
    labels = torch.zeros(2, 24, dtype=torch.int64, device="cuda")
    loss = cross_entropy_sum(x, labels, chunk_tokens=16, weight=weight)
    assert form(loss) == ((), FP32, "cuda")


def test_experts() -> None:
    rows, w1, w2, w3 = rand(40, 32), rand(4, 64, 32), rand(4, 32, 64), rand(4, 64, 32)
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    out = grouped_matmuls(rows, counts, w1, w2, w3)
    assert form(out) == form(rows)


def test_router() -> None:
    gate = Gate(32, 4)
    gate.weight = nn.Parameter(rand(4, 32).detach())
    logits = gate(rand(2, 24, 32))
    assert form(logits) == ((2, 24, 4), FP32, "cuda")
    assert "LinearIntoFp32" in str(logits.grad_fn.next_functions)


def test_clipping() -> None:
    weights = [nn.Parameter(rand(8, 8, dtype=dtype).detach()) for dtype in (FP32, FP32)]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    assert form(clip_gradients(weights, max_norm=1.0)) == ((), FP32, "cuda")
