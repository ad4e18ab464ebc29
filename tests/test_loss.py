"""Chunked cross entropy equals the plain one, in value, gradient and memory's shape."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.losses import cross_entropy_sum
from tests.support.operations import Watch
from tests.support.ranks import Pool
from titan.losses.loss import (
    IGNORED,
    Kernels,
    LossSum,
    VocabularyShard,
    defer_lm_head,
)
from titan.losses.loss_kernels import _fused_statistics


@pytest.mark.parametrize("chunk", [0, 1, 7, 24, 100])
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


def test_a_second_backward_pass_is_refused() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1, 2, 3]), chunk_tokens=2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize("chunk", [0, 1, 7, 24, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_with_the_output_layer_equals_plain(chunk: int, compiled: bool) -> None:
    """The layer's matrix products and the loss, chunk by chunk: same loss, and gradients of input and weight."""
    torch.manual_seed(0)
    h, w = torch.randn(2, 12, 16), torch.randn(50, 16) * 0.3
    labels = torch.randint(50, (2, 12))
    labels[0, 3:8] = IGNORED
    ours = [h.clone().requires_grad_(), w.clone().requires_grad_()]
    plain = [h.clone().requires_grad_(), w.clone().requires_grad_()]
    kernels = Kernels.compiled("aot_eager") if compiled else Kernels()
    loss = cross_entropy_sum(
        ours[0], labels, chunk_tokens=chunk, weight=ours[1], kernels=kernels
    )
    expected = F.cross_entropy(
        (plain[0] @ plain[1].T).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (loss / 19).backward()
    (expected / 19).backward()
    for a, b in zip(ours, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        assert ((a.grad - b.grad).norm() / b.grad.norm()).item() < 1e-6


def test_products_into_fp32_equal_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: logits and the weight's gradient, which adds up in place, come out of products of bf16 in fp32."""

    def product(function: Any) -> Any:
        def call(
            *tensors: torch.Tensor, out_dtype: Any = None, out: Any = None
        ) -> torch.Tensor:
            if out_dtype is None:
                return function(*tensors, out=out)
            assert tensors[-1].dtype == tensors[-2].dtype == torch.bfloat16
            assert out_dtype == torch.float32 and (out is None or out is tensors[0])
            return function(*(x.float() for x in tensors), out=out)

        return call

    monkeypatch.setattr("titan.losses.loss.multiplies_into_fp32", lambda *_: True)
    monkeypatch.setattr(torch, "mm", product(torch.mm))
    monkeypatch.setattr(torch, "addmm", product(torch.addmm))
    torch.manual_seed(0)
    tensors = torch.randn(24, 16).bfloat16(), (torch.randn(50, 16) * 0.3).bfloat16()
    ours = [x.clone().requires_grad_() for x in tensors]
    plain = [x.float().requires_grad_() for x in tensors]
    labels = torch.randint(50, (24,))
    labels[3:8] = IGNORED
    loss = cross_entropy_sum(ours[0], labels, chunk_tokens=7, weight=ours[1])
    expected = F.cross_entropy(plain[0] @ plain[1].T, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(loss, ours), torch.autograd.grad(expected, plain), strict=True
    ):
        assert a.dtype == torch.bfloat16
        # The gradient of logits, and the results, are rounded to 8 bits.
        assert ((a.float() - b).norm() / b.norm()).item() < 4e-3


def test_a_probability_next_to_one_keeps_its_gradient() -> None:
    """In bf16 it would round to 1, and its gradient to 0."""
    logits = torch.zeros(1, 64, dtype=torch.bfloat16)
    logits[0, 5] = 12.0
    logits.requires_grad_()
    cross_entropy_sum(logits, torch.tensor([5]), chunk_tokens=1, kernels=Kernels()).backward()
    assert logits.grad is not None
    expected = logits.detach().double().softmax(-1)[0, 5] - 1
    assert logits.grad[0, 5].item() == pytest.approx(expected.item(), rel=4e-3)


def test_the_backward_pass_may_come_in_two_parts() -> None:
    """As zero-bubble schedules do: for the input, and later for the weight."""
    h, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.arange(6)
    loss = cross_entropy_sum(h, labels, chunk_tokens=4, weight=w)
    (d_h,) = torch.autograd.grad(loss, h, retain_graph=True)
    (d_w,) = torch.autograd.grad(loss, w)
    expected = torch.autograd.grad(F.cross_entropy(h @ w.T, labels, reduction="sum"), (h, w))
    torch.testing.assert_close((d_h, d_w), expected)


@pytest.mark.parametrize("with_weight", [False, True])
def test_a_loss_that_is_kept_keeps_no_gradients(with_weight: bool) -> None:
    """Pipeline schedules keep the loss of every microbatch to the end of the step: fp32 gradients of the weight would add up."""
    made: list[tuple[int, StorageWeakRef]] = []

    def see(func: Any, args: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            made.append((result.numel(), StorageWeakRef(result.untyped_storage())))

    weight = torch.randn(500, 16, requires_grad=True) if with_weight else None
    input = torch.randn(8, 16 if with_weight else 500, requires_grad=True)
    with Watch(see):
        loss = cross_entropy_sum(input, torch.arange(8), chunk_tokens=4, weight=weight)
        loss.backward()
    for tensor in (input, weight):
        if tensor is not None:
            tensor.grad = None
    given = {t.untyped_storage()._cdata for t in (input, weight) if t is not None}
    left = [size for size, ref in made if not ref.expired() and ref.cdata not in given]
    assert loss.isfinite() and max(left) == 1


def test_the_scale_of_the_gradient_is_not_rounded() -> None:
    """1 / (number of tokens) in bf16 would be off, here by 0.27%, for all gradients alike."""
    divisor = 1021
    assert abs(torch.tensor(1 / divisor).bfloat16().item() * divisor - 1) > 2.6e-3
    h = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(90, 128, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy_sum(h, torch.arange(64), chunk_tokens=50, weight=w)
    whole = torch.autograd.grad(loss, (h, w), retain_graph=True)
    for divided, undivided in zip(
        torch.autograd.grad(loss / divisor, (h, w)), whole, strict=True
    ):
        ratio = divided.double().norm() * divisor / undivided.double().norm()
        assert abs(ratio.item() - 1) < 3e-4


@pytest.mark.parametrize("with_weight", [False, True])
def test_logits_are_never_whole(with_weight: bool) -> None:
    """In fp32. With the weight, one chunk's logits have its size."""
    dtype = torch.float32 if with_weight else torch.bfloat16
    input = torch.randn(64, 8 if with_weight else 100, dtype=dtype, requires_grad=True)
    weight = torch.randn(100, 8, requires_grad=True) if with_weight else None
    sizes = []

    def see(func: Any, args: Any, result: Any) -> None:
        found = result if isinstance(result, tuple) else (result,)
        tensors = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
        sizes.extend(tensor.numel() for tensor in tensors if tensor.dtype == torch.float32)

    with Watch(see):
        labels = torch.randint(100, (64,))
        cross_entropy_sum(input, labels, chunk_tokens=8, weight=weight).backward()
    assert max(sizes) == 8 * 100


def _torchs_own(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and this rank's part of the gradient, of logits split over the vocabulary, all at once."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole, rank_columns = torch.randn(3, 8, vocabulary) * 3, -(-vocabulary // mesh.size())
    mine = whole[..., rank * rank_columns : (rank + 1) * rank_columns].clone().requires_grad_()
    shard = VocabularyShard(mesh.get_group(), start=rank * rank_columns, mesh=mesh)
    labels = torch.arange(24).view(3, 8) % vocabulary
    labels[1, 2:5] = IGNORED
    loss = cross_entropy_sum(mine, labels, chunk_tokens=0, shard=shard)
    loss.backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("vocabulary", [20, 19])
def test_torchs_own_loss_over_a_split_vocabulary(vocabulary: int, pool: Pool) -> None:
    (loss, first), (other, second) = pool.run(2, _torchs_own, vocabulary)
    torch.manual_seed(0)
    logits = (torch.randn(3, 8, vocabulary) * 3).requires_grad_()
    labels = torch.arange(24).view(3, 8) % vocabulary
    labels[1, 2:5] = IGNORED
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    assert loss == other
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([first, second], dim=-1), logits.grad)


def _split_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and whole gradient of a weight that is given as tensor parallelism leaves it."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    h, w = torch.randn(6, 4), torch.randn(9, 4)
    weight: Any = distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    shard = VocabularyShard(mesh.get_group(), start=5 * dist.get_rank())
    with pytest.raises(ValueError, match="after the forward pass, when FSDP has gathered it"):
        cross_entropy_sum(h, torch.arange(6), chunk_tokens=4, weight=weight)
    loss = cross_entropy_sum(h, torch.arange(6), chunk_tokens=4, weight=weight, shard=shard)
    loss.backward()
    return loss.detach(), weight.grad.full_tensor()


def test_a_weight_may_be_given_as_tensor_parallelism_leaves_it(pool: Pool) -> None:
    torch.manual_seed(0)
    h, w = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    expected = F.cross_entropy(h @ w.T, torch.arange(6), reduction="sum")
    expected.backward()
    for loss, gradient in pool.run(2, _split_weight):
        torch.testing.assert_close((loss, gradient), (expected.detach(), w.grad))


def _smoothed(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_CV, labels_C, reduction="sum", label_smoothing=0.1)


def _custom_over_vocabulary(with_weight: bool) -> list[torch.Tensor]:
    """Loss and gradients of a package's loss, of 19 columns of which this rank has 10 or 9."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    h, w = torch.randn(24, 4), torch.randn(19, 4)
    labels = torch.arange(24) % 19
    labels[5:9] = IGNORED
    shard = VocabularyShard.of(mesh, 19)
    w = w[rank * 10 : (rank + 1) * 10].clone().requires_grad_()
    h.requires_grad_()
    input, weight = (h, w) if with_weight else (h @ w.T, None)
    loss = cross_entropy_sum(
        input, labels, chunk_tokens=7, weight=weight, shard=shard, custom=_smoothed
    )
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return [loss.detach(), h.grad, w.grad]


@pytest.mark.parametrize("with_weight", [False, True])
def test_a_packages_loss_over_a_split_vocabulary(with_weight: bool, pool: Pool) -> None:
    (loss, h0, w0), (other, h1, w1) = pool.run(2, _custom_over_vocabulary, with_weight)
    torch.manual_seed(0)
    h, w = torch.randn(24, 4, requires_grad=True), torch.randn(19, 4, requires_grad=True)
    labels = torch.arange(24) % 19
    labels[5:9] = IGNORED
    expected = _smoothed(h @ w.T, labels)
    expected.backward()
    assert loss == other
    # Of the input, each rank has its part of a sum.
    torch.testing.assert_close(
        (loss, h0 + h1, torch.cat([w0, w1])), (expected.detach(), h.grad, w.grad)
    )


def test_validation_reports_the_cross_entropy() -> None:
    """So that runs with other losses compare, and bits per byte mean what they say."""
    logits, labels = torch.randn(12, 50), torch.randint(50, (12,))
    loss_sum = LossSum(5, custom=_smoothed)
    torch.testing.assert_close(loss_sum(logits, labels), _smoothed(logits, labels))
    with torch.no_grad():
        found = loss_sum(logits, labels)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction="sum"))


def test_mistakes_that_would_compute_another_loss() -> None:
    with pytest.raises(ValueError, match=r"labels are \(1,\) and the input is \(8, 5\)"):
        cross_entropy_sum(torch.randn(8, 5), torch.tensor([3]), chunk_tokens=8)
    with pytest.raises(ValueError, match="build it with bias=False"):
        defer_lm_head(torch.nn.Linear(4, 5))


@pytest.mark.parametrize(
    "kernels", [None, Kernels.compiled("eager")], ids=["eager", "compiled"]
)
def test_masked_logits_of_tokens_that_do_not_count(kernels: Kernels | None) -> None:
    """A model that masks token 0: ignored labels stand for it, and must give neither a loss nor a gradient."""
    logits = torch.randn(6, 9)
    logits[:, 0] = -torch.inf
    labels = torch.tensor([1, IGNORED, 3, 8, IGNORED, 2])
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy_sum(ours, labels, chunk_tokens=4, kernels=kernels)
    expected = F.cross_entropy(plain, labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_shard_of_padding_alone_adds_nothing() -> None:
    logits = torch.full((2, 5), -torch.inf)
    lse, _ = _fused_statistics(logits, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(lse, torch.logsumexp(logits, dim=-1))


class AskedFor:
    """The settings of Inductor's passes, which notes the names that are read."""

    def __init__(self, config: Any) -> None:
        self.config, self.names = config, set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.config, name)


def logsumexp(logits_CV: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits_CV.float(), dim=-1)


def test_inductor_reads_the_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds its online softmax in our statistics, and asks whether the device has the kernel. In torch's logsumexp it finds none."""
    passes = importlib.import_module("torch._inductor.fx_passes.post_grad")
    logits, column = torch.randn(8, 33), torch.randint(33, (8,))
    for function, finds in (
        (partial(_fused_statistics, column_C=column), True),
        (logsumexp, False),
    ):
        asked = AskedFor(inductor_config)
        monkeypatch.setattr(passes, "config", asked)
        with inductor_config.patch(force_disable_caches=True):
            found = torch.compile(function, fullgraph=True)(logits)
        assert ("online_softmax" in asked.names) == finds
        lse = found[0] if finds else found
        torch.testing.assert_close(lse, torch.logsumexp(logits, dim=-1))


def test_no_pass_of_the_weight_gradient_but_its_matmuls() -> None:
    """Neither zeros before the first chunk, nor an addition to them: at C of N tokens, N/C matmuls and N/C - 1 additions."""
    weight, x = torch.randn(50, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    found = []

    def see(func: Any, args: Any, result: Any) -> None:
        if not func.is_view and getattr(result, "shape", None) == weight.shape:
            found.append(func.overloadpacket.__name__)

    with Watch(see):
        loss = cross_entropy_sum(x, torch.randint(50, (12,)), chunk_tokens=4, weight=weight)
    assert sorted(found) == ["add_"] * 2 + ["mm"] * 3
    loss.backward()
