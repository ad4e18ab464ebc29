"""Products of 16 bits into fp32 against fp32 products of the same inputs, with CUDA's operator written out on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titan.models.common.moe import Gate
from titan.parallel import matmul_fp32
from titan.parallel.matmul_fp32 import linear_in_fp32, multiplies_into_fp32

BF16, FP32 = torch.bfloat16, torch.float32
calls: list[tuple[torch.dtype, ...]] = []
_mm = torch.mm


def mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        calls.append((a.dtype, b.dtype, out_dtype or a.dtype))
    return _mm(a, b) if out_dtype is None else _mm(a.to(out_dtype), b.to(out_dtype))


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(matmul_fp32, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch, "mm", mm)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((2, 12, 16), (5, 16))]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_of_16_bits_equal_those_of_fp32(
    dtype: torch.dtype, compiled: bool, as_on_cuda: None
) -> None:
    product = linear_in_fp32
    if compiled:
        product = torch.compile(linear_in_fp32, backend="aot_eager", fullgraph=True)
    results = []
    for ours in (True, False):
        x, weight = inputs(dtype)
        y = product(x, weight) if ours else F.linear(x.float(), weight.float())
        (y.sin() * y).sum().backward()  # a gradient with all the bits of fp32
        results.append((y, x.grad, weight.grad))
    assert results[0][0].dtype == FP32
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    # The gradient of the result is not rounded.
    assert compiled or calls[:3] == [
        (dtype, dtype, FP32),
        (FP32, FP32, FP32),
        (FP32, FP32, FP32),
    ]


def test_a_router_multiplies_16_bits_where_nothing_is_rounded(as_on_cuda: None) -> None:
    gate = Gate(16, 5).bfloat16()
    gate(torch.ones(2, 12, 16, dtype=BF16))
    assert calls == [(BF16, BF16, FP32)]
    gate(torch.ones(2, 12, 16))
    gate.float()(torch.ones(2, 12, 16, dtype=BF16))  # a weight in fp32 would lose bits
    assert calls == [(BF16, BF16, FP32)]


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [(BF16, (9, 0), True), (BF16, (7, 5), False), (FP32, (9, 0), False), (BF16, (0, 0), False)],
)
def test_devices(
    dtype: torch.dtype,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_fp32, "compute_capability", lambda _: capability)
    assert multiplies_into_fp32(dtype, "cuda") == expected
