"""Pipeline stages and attention kernels on one accelerator, against the CPU in fp32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.losses import cross_entropy_sum
from titan.losses.loss import Kernels
from titan.models.common.attention import InnerAttention
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import Pipeline, build_mesh, extract_stages, initialize, split_stages
from titan.parallel.block_attention import AttentionSpec
from titan.parallel.documents import MaskForm, document_cu_seqlens, mask_of
from titan.parallel.matmul_fp32 import linear_in_fp32

BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@pytest.fixture(scope="module")
def group():
    torch.accelerator.set_device_index(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_stages_on_one_device_equal_the_whole_model_on_a_cpu(
    group: None, schedule: str
) -> None:
    sizes = dataclasses.replace(FLAVORS["tiny"], n_layers=4)
    whole = build_model(sizes)
    initialize(whole, seed=0, std_of=whole.init_std)
    rows = torch.randint(sizes.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    expected = cross_entropy_sum(whole(tokens), labels, chunk_tokens=64)
    (expected / 256).backward()

    plan = split_stages(4, num_ranks=1, num_microbatches=4, schedule=schedule)
    device = torch.device("cuda:0")
    numbers = plan.schedule.stages_of(0)
    assert len(numbers) == 2
    stages = extract_stages(whole, plan.modules, numbers=numbers)
    for stage in stages.values():
        stage.to(device).zero_grad()
    pipeline = Pipeline(
        stages,
        schedule=plan.schedule,
        mesh=build_mesh("cuda")["dp_shard"],
        device=device,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target, chunk_tokens=64),
        boundary=lambda x, _: torch.empty(*x.shape, sizes.dim, device="meta"),
    )
    losses = pipeline.step(tokens.to(device), labels.to(device), divide_by=256.0)
    assert len(losses) == 4
    torch.testing.assert_close(
        torch.stack(losses).sum().cpu(), expected.detach(), rtol=1e-5, atol=0
    )
    gradients = {n: p.grad for stage in stages.values() for n, p in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        gradient, reference = gradients[name], parameter.grad
        assert gradient is not None and reference is not None
        error = (gradient.cpu() - reference).norm() / reference.norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_kernels_equal_the_cpu(backend: SDPBackend, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8, 256, 64), (2, kv_heads, 256, 64), (2, kv_heads, 256, 64)]
    inputs = [torch.randn(s, generator=generator).bfloat16() for s in shapes]
    reference = [x.float().requires_grad_() for x in inputs]
    ours = [x.cuda().requires_grad_() for x in inputs]
    expected = InnerAttention()(*reference)
    if backend == SDPBackend.EFFICIENT_ATTENTION and kv_heads != 8:
        pytest.skip("the memory-efficient kernel takes no grouped heads")
    with sdpa_kernel(backend):
        output = InnerAttention()(*ours)
    weight = torch.randn(expected.shape, generator=generator)
    (expected * weight).sum().backward()
    (output.float() * weight.cuda()).sum().backward()
    pairs = [(output.detach(), expected.detach())]
    pairs += [(a.grad, b.grad) for a, b in zip(ours, reference, strict=True)]
    for ours_, theirs in pairs:
        assert ours_ is not None and theirs is not None
        error = (ours_.float().cpu() - theirs).norm() / theirs.norm()
        assert error < 1e-2  # bf16 has 8 bits


@pytest.mark.parametrize("form", ["varlen", "flex"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("spec", "has_sinks"),
    [
        (AttentionSpec(), False),
        (AttentionSpec(), True),
        (AttentionSpec(window=50), True),
        (AttentionSpec(causal=False), False),
    ],
)
def test_document_masks_equal_a_dense_one(
    spec: AttentionSpec, has_sinks: bool, form: MaskForm, compiled: bool
) -> None:
    """Output and gradients in bf16 against a dense mask in fp32; documents of 1 to 700 tokens, and one of a whole row."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(2, 1000, generator=generator) < 0.005
    starts[0] = False
    ids = starts.cumsum(1)
    assert ids.max() > 2
    shapes = ((2, 8, 1000, 64), (2, 2, 1000, 64), (2, 2, 1000, 64))
    shapes = (*shapes, (8,)) if has_sinks else shapes
    inputs = [torch.randn(shape, generator=generator, dtype=torch.bfloat16) for shape in shapes]
    expected = [x.float().requires_grad_() for x in inputs]
    attention = InnerAttention(window=spec.window, causal=spec.causal)
    out = attention(*expected[:3], ids, *expected[3:])
    out.square().mean().backward()
    found = [x.cuda().requires_grad_() for x in inputs]
    mask = mask_of(
        ids.cuda(), form=form, cu_seqlens_BN=document_cu_seqlens(ids).cuda(), specs=(spec,)
    )
    found_out = (torch.compile(attention) if compiled else attention)(
        *found[:3], mask, *found[3:]
    )
    found_out.float().square().mean().backward()
    for a, b in zip(
        [out, *(x.grad for x in expected)], [found_out, *(x.grad for x in found)], strict=True
    ):
        assert a is not None and b is not None
        assert (a - b.cpu().float()).abs().max() <= 0.02 * a.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "has_sinks"), [(50, False), (50, True), (0, True)])
def test_windows_and_sinks_equal_the_cpu(
    window: int, has_sinks: bool, dtype: torch.dtype
) -> None:
    """Without documents: FlashAttention in 16 bits, FlexAttention or the memory-efficient kernel in 32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 1000, 64), (2, 2, 1000, 64), (2, 2, 1000, 64), (8,))[: 3 + has_sinks]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    results = []
    for device, precision in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = [x.detach().to(device, precision).requires_grad_() for x in inputs]
        out = InnerAttention(window=window)(*leaves[:3], None, *leaves[3:])
        out.float().square().mean().backward()
        results.append([out, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        assert (a - b.cpu().float()).abs().max() <= 0.02 * a.abs().max()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_multiplies_into_fp32(compiled: bool) -> None:
    """The chunked loss of bf16 inputs against fp32 on a CPU: only the gradient of logits, and results, are rounded to 8 bits."""
    torch.manual_seed(0)
    tensors = torch.randn(300, 64).bfloat16(), (torch.randn(1000, 64) * 0.3).bfloat16()
    labels = torch.randint(1000, (300,))
    ours = [x.cuda().requires_grad_() for x in tensors]
    plain = [x.float().requires_grad_() for x in tensors]
    kernels = Kernels.compiled("inductor") if compiled else None
    loss = cross_entropy_sum(
        ours[0], labels.cuda(), chunk_tokens=128, weight=ours[1], kernels=kernels
    )
    expected = cross_entropy_sum(plain[0], labels, chunk_tokens=0, weight=plain[1])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(loss, ours), torch.autograd.grad(expected, plain)
    for a, b in zip(*gradients, strict=True):
        assert ((a.cpu().float() - b).norm() / b.norm()).item() < 4e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_the_router_multiplies_into_fp32(compiled: bool) -> None:
    """Logits of bf16 inputs and their gradients against products of the same numbers in fp32: only sums have another order."""
    torch.manual_seed(0)
    tensors = torch.randn(2, 300, 256).bfloat16().cuda(), torch.randn(64, 256).bfloat16().cuda()
    product = torch.compile(linear_in_fp32, fullgraph=True) if compiled else linear_in_fp32
    results = []
    for ours in (True, False):
        inputs = [x.clone().requires_grad_() for x in tensors]
        y = (
            product(*inputs)
            if ours
            else torch.nn.functional.linear(*(x.float() for x in inputs))
        )
        assert y.grad_fn is not None
        assert ("IntoFp32" in str(y.grad_fn.next_functions)) == (ours and not compiled)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    # Gradients are rounded to 8 bits in the end: a sum in another order may round to the neighbour.
    for found, expected, bound in zip(*results, (1e-6, 1e-3, 1e-3), strict=True):
        assert ((found - expected).float().norm() / expected.float().norm()).item() < bound
