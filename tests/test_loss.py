"""Chunked cross entropy equals the plain one, in value, gradient and memory's shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titan.data.packing import IGNORED
from titan.loss import cross_entropy_sum


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_cross_entropy(chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(2, 12, 50) * 3).to(dtype)
    labels = torch.randint(50, (2, 12))
    labels[0, 3:8] = IGNORED
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy_sum(ours, labels, chunk_tokens=chunk)
    expected = F.cross_entropy(plain.float().flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    (loss / 19).backward()
    (expected / 19).backward()
    assert ours.grad is not None and plain.grad is not None
    assert ours.grad.dtype == dtype
    assert (ours.grad[0, 3:8] == 0).all()
    # bf16 gradients are rounded once more, after the division: half a unit in the last place.
    torch.testing.assert_close(
        ours.grad, plain.grad, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-7
    )


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    logits = torch.randn(4, 9)
    labels = torch.tensor([1, IGNORED, 3, 8])
    with torch.no_grad():
        loss = cross_entropy_sum(logits, labels, chunk_tokens=2)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))


def test_all_ignored_is_zero() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((3,), IGNORED), chunk_tokens=2)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and (logits.grad == 0).all()


def test_a_second_backward_pass_is_refused() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1, 2, 3]), chunk_tokens=2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_logits_are_never_whole_in_fp32() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    largest = max(largest, tensor.numel())
            return result

    logits = torch.randn(64, 100, dtype=torch.bfloat16, requires_grad=True)
    with Watch():
        loss = cross_entropy_sum(logits, torch.randint(100, (64,)), chunk_tokens=8)
        loss.backward()
    assert largest == 8 * 100
