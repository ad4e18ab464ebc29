"""Context parallelism against one process: output and gradients, every method, and what is refused.

Errors are the largest difference over the largest value, over output and gradients and through two layers. Measured
on torch 2.13: float64 up to 1.7e-15, float32 1.0e-6, bfloat16 1.2e-2, with documents 8e-16 and 4.6e-7.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.attention import plain_formula
from titan.parallel import block_attention, ring
from titan.parallel.activation import apply_ac
from titan.parallel.block_attention import CAUSAL, AttentionSpec
from titan.parallel.context import apply_cp, check_divides, shard_sequence, unshard_sequence
from titan.parallel.ring import SequencePart, visible
from titan.parallel.sac_save_list import DEFAULT_KEEP

METHODS = ("ring", "allgather", "ulysses")


class PlainAttention(nn.Module):
    """Attention of another package's model: causal or with `spec`, grouped heads, documents, sinks."""

    is_causal_softmax = True
    scale: float | None = None
    spec = CAUSAL

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_ids: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.spec != CAUSAL or sinks is not None:
            options = {"ids": document_ids, "sinks": sinks, "scale": self.scale}
            return plain_formula(q, k, v, spec=self.spec, **options)
        mask = None
        if document_ids is not None:
            mask = (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=self.scale
        )


class Net(nn.Module):
    """Holds the attention two levels deep, twice."""

    def __init__(self, scale: float | None = None, spec: AttentionSpec = CAUSAL) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(), nn.Sequential()])
        for block in self.blocks:
            attention = PlainAttention()
            attention.scale, attention.spec = scale, spec
            block.add_module("attention", attention)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        first, second = (block.get_submodule("attention") for block in self.blocks)
        size = q.shape[-1]
        out = second(_wide(first(q, k, v, ids, *sinks), size), k, v, ids, *sinks)
        return q + _wide(out, size)


def _wide(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]), value=1.0)


def _inputs(
    length: int, heads: int, groups: int, dtype: torch.dtype, value_size: int = 8
) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v; the gradient of the output; document ids of uneven documents, other ones in each sample."""
    generator = torch.Generator().manual_seed(length + heads)
    sizes = ((heads, 8), (groups, 8), (groups, value_size), (heads, 8))
    shapes = [(2, number, length, size) for number, size in sizes]
    *qkv, grad = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes
    )
    starts = torch.rand(2, length, generator=generator) < 0.15
    return qkv, grad, starts.long().cumsum(1)


def _gradients(net: Net, qkv: list[Tensor], grad: Tensor, ids: Tensor | None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = net(*leaves, ids=ids)
    # Not contiguous, as a model's transpose makes it.
    out.backward(grad.transpose(1, 2).contiguous().transpose(1, 2))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _largest_error(case: dict[str, Any], documents: bool = False) -> float:
    """Of output, dq, dk and dv of the part here, and of sinks' gradient, through two layers, against the whole on one process."""
    mesh = init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",)
    )
    case = dict(case)
    method, balanced = case.pop("method"), case.pop("balanced")
    scale, spec = case.pop("scale", None), case.pop("spec", CAUSAL)
    sinks = [torch.linspace(-1, 2, case["heads"], dtype=case["dtype"])] * case.pop(
        "sinks", False
    )
    qkv, grad, ids = _inputs(**case)
    split = {"rank": mesh.get_local_rank(), "size": mesh.size(), "balanced": balanced}
    expected = _gradients(Net(scale, spec), [*qkv, *sinks], grad, ids if documents else None)
    net = Net(scale, spec)
    apply_cp(net, mesh=mesh, attention_type=PlainAttention, method=method, balanced=balanced)
    local_ids = shard_sequence(ids, dim=1, **split) if documents else None
    local_qkv = [shard_sequence(x, dim=2, **split) for x in qkv]
    local_grad = shard_sequence(grad, dim=2, **split)
    actual = _gradients(net, [*local_qkv, *sinks], local_grad, local_ids)
    assert len(actual) == len(expected) == 4 + len(sinks)
    errors = []
    for mine, whole in zip(actual, expected, strict=True):
        if whole.ndim == 1:  # of sinks: each rank has a part of the sum
            torch.distributed.all_reduce(mine)
            theirs = whole
        else:
            theirs = shard_sequence(whole, dim=2, **split)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        errors.append(((mine - theirs).abs().max() / whole.abs().max()).item())
    return max(errors)


def _largest_errors(cases: list[dict[str, Any]], documents: bool) -> list[float]:
    return [_largest_error(case, documents) for case in cases]


def _cases(
    world: int, dtype: torch.dtype, methods: tuple[str, ...] = METHODS
) -> list[dict[str, Any]]:
    lengths = (2 * world, 10 * world, 36 * world)
    heads = 6 if world == 3 else 4
    return [
        {
            "method": method,
            "balanced": balanced,
            "length": length,
            "heads": heads,
            "groups": groups,
            "dtype": dtype,
        }
        for method in methods
        for balanced in (True, False)
        for length in lengths
        for groups in (heads, 2, 1)
    ]


def _check(pool: Any, world: int, dtype: torch.dtype, bound: float, documents: bool) -> None:
    cases = _cases(world, dtype)
    for errors in pool.run(world, _largest_errors, cases, documents):
        for case, error in zip(cases, errors, strict=True):
            assert error < bound, (case, error)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_in_float64(pool, world: int) -> None:
    _check(pool, world, torch.float64, 1e-14, documents=False)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rounding_in_float32(pool, world: int) -> None:
    _check(pool, world, torch.float32, 2e-6, documents=False)


@pytest.mark.parametrize("world", [2, 4])
def test_documents(pool, world: int) -> None:
    _check(pool, world, torch.float64, 1e-14, documents=True)
    _check(pool, world, torch.float32, 2e-6, documents=True)


@pytest.mark.parametrize("documents", [False, True])
def test_scale_and_values_of_another_size(pool, documents: bool) -> None:
    """As latent attention has them."""
    changes = {"scale": 0.7, "value_size": 5}
    cases = [case | changes for case in _cases(2, torch.float64)]
    for errors in pool.run(2, _largest_errors, cases, documents):
        assert max(errors) < 1e-14


SIGHTS = (
    AttentionSpec(window=2),
    AttentionSpec(window=7),
    AttentionSpec(window=50),
    AttentionSpec(causal=False),
)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_windows_sinks_and_all_keys(pool, world: int, documents: bool) -> None:
    """Windows within a chunk, over several, and longer than the sequence: chunks have 5 to 36 keys."""
    cases = [
        case | {"spec": spec, "sinks": sinks, "scale": 0.4}
        for case in _cases(world, torch.float64)
        for spec, sinks in (
            *((spec, False) for spec in SIGHTS),
            (CAUSAL, True),
            (SIGHTS[1], True),
        )
        if case["groups"] == 2 and case["length"] != 2 * world
    ]
    for errors in pool.run(world, _largest_errors, cases, documents):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-14, (case, error)


def test_rounding_in_bfloat16(pool) -> None:
    _check(pool, 4, torch.bfloat16, 2e-2, documents=False)


def _compiled_errors(method: Any) -> list[float]:
    """Forward and backward of one compiled graph, without a break, against the same uncompiled."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    errors = []
    sinks = [torch.linspace(-1, 2, 4)]
    for dtype, spec, more in (
        (torch.float32, CAUSAL, []),
        (torch.float32, AttentionSpec(window=3), sinks),
        (torch.bfloat16, CAUSAL, []),
    ):
        qkv, grad, _ = _inputs(length=8, heads=4, groups=2, dtype=dtype)
        qkv = [*qkv, *more]
        net = Net(spec=spec)
        apply_cp(net, mesh=mesh, attention_type=PlainAttention, method=method)
        expected = _gradients(net, qkv, grad, None)
        net.compile(backend="aot_eager", fullgraph=True)
        actual = _gradients(net, qkv, grad, None)
        pairs = zip(actual, expected, strict=True)
        errors.append(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    return errors


@pytest.mark.parametrize("method", METHODS)
def test_compiles_without_a_graph_break(pool, method: str) -> None:
    """torch 2.11 gave wrong gradients here, without a word, until the output became a copy of its own."""
    for *float32, bfloat16 in pool.run(2, _compiled_errors, method):
        assert max(float32) < 2e-6 and bfloat16 < 2e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = PlainAttention()

    def forward(self, qkv: Tensor) -> Tensor:
        return torch.sin(self.attention(*qkv.sin())) + qkv


def _recomputed(method: Any) -> list[bool]:
    """Whether output and gradient are those of a run that keeps everything, with attention kept and the rest run again."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found: list[list[Tensor]] = []
    for keep in (None, DEFAULT_KEEP, ()):
        net = nn.ModuleDict({"layers": nn.Sequential(Block(), Block())})
        apply_cp(net, mesh=mesh, attention_type=PlainAttention, method=method)
        if keep is not None:
            apply_ac(net, keep=keep)
        x = torch.linspace(-1, 1, 3 * 2 * 4 * 16 * 8).view(3, 2, 4, 16, 8).requires_grad_()
        out = net["layers"](x)
        out.pow(2).sum().backward()
        assert x.grad is not None
        found.append([out.detach(), x.grad])
    return [
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_with_attention_kept(pool, method: str) -> None:
    """What attention returned is kept by checkpointing, and nothing may write to it."""
    for same in pool.run(2, _recomputed, method):
        assert same == [True] * 4


def _ring_of_one_process(
    monkeypatch: pytest.MonkeyPatch, whole: list[Tensor], grad: Tensor, split: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and dq of one rank, and its share of everyone's dkv, with keys handed over instead of gathered."""
    q, k, v = whole
    size, balanced = split["size"], split["balanced"]
    kvs = [
        torch.stack(
            [shard_sequence(x, dim=2, rank=r, size=size, balanced=balanced) for x in (k, v)]
        )
        for r in range(size)
    ]
    shares = []
    monkeypatch.setattr(ring, "wait", lambda x: x)
    monkeypatch.setattr(ring, "start_all_gather", lambda own, **_: torch.stack(kvs))
    monkeypatch.setattr(
        ring, "start_reduce_scatter", lambda share, **_: shares.append(share) or share[:1]
    )
    leaves = [shard_sequence(x, dim=2, **split).requires_grad_() for x in (q, k, v)]
    out = ring.ring_attention(*leaves, part=SequencePart("", **split), gather=True)
    out.backward(shard_sequence(grad, dim=2, **split))
    assert leaves[0].grad is not None
    return out.detach(), leaves[0].grad, shares[0]


def _check_kernels(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    balanced: bool,
    bound: float,
) -> None:
    """Every rank's blocks, one rank after the other on one device, against float64 on a CPU."""
    generator = torch.Generator().manual_seed(0)
    # Chunks of 75 positions: no multiple of a tile.
    shapes = [(2, h, 600, 32) for h in (4, 2, 2, 4)]
    *whole, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    leaves = [x.double().requires_grad_() for x in whole]
    out = PlainAttention()(*leaves)
    expected_dq, *expected_dkv = torch.autograd.grad(out, leaves, grad.double())
    total_dkv = torch.zeros(1)
    whole, grad = [x.to(device) for x in whole], grad.to(device)
    for rank in range(4):
        split = {"rank": rank, "size": 4, "balanced": balanced}
        mine, dq, share = _ring_of_one_process(monkeypatch, whole, grad, split)
        total_dkv = total_dkv + share.double().cpu()
        for actual, expected in ((mine, out), (dq, expected_dq)):
            difference = actual.double().cpu() - shard_sequence(expected, dim=2, **split)
            assert difference.abs().max() < bound * expected.abs().max()
    for actual, expected in zip(total_dkv.unbind(1), expected_dkv, strict=True):
        parts = torch.cat(list(actual), dim=2)
        difference = unshard_sequence(parts, dim=2, size=4, balanced=balanced) - expected
        assert difference.abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("balanced", [True, False])
def test_kernels_of_a_cpu(monkeypatch: pytest.MonkeyPatch, balanced: bool) -> None:
    _check_kernels(monkeypatch, "cpu", torch.float32, balanced, 2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cudnn", "bound"),
    [(torch.bfloat16, True, 1e-2), (torch.bfloat16, False, 1e-2), (torch.float32, False, 1e-5)],
)
def test_kernels_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    cudnn: bool,
    bound: float,
    balanced: bool,
) -> None:
    if not cudnn:
        monkeypatch.setattr(block_attention, "_cudnn_is_faster", lambda: False)
    device = torch.accelerator.current_accelerator()
    _check_kernels(monkeypatch, str(device), dtype, balanced, bound)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("balanced", [True, False])
def test_parts_make_up_the_sequence(size: int, balanced: bool) -> None:
    whole = torch.arange(2 * 48 * 3).view(2, 48, 3)
    parts = [
        shard_sequence(whole, dim=1, rank=r, size=size, balanced=balanced) for r in range(size)
    ]
    assert all(part.shape == (2, 48 // size, 3) for part in parts)
    joined = torch.cat(parts, dim=1)
    assert torch.equal(unshard_sequence(joined, dim=1, size=size, balanced=balanced), whole)


def test_a_part_is_a_head_and_a_tail() -> None:
    positions = torch.arange(12)
    split = {"dim": 0, "rank": 1, "size": 3}
    assert shard_sequence(positions, **split, balanced=True).tolist() == [2, 3, 8, 9]
    assert shard_sequence(positions, **split, balanced=False).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("window", [0, 1, 3, 5, 30])
@pytest.mark.parametrize("balanced", [True, False])
def test_blocks_are_the_causal_mask(balanced: bool, window: int) -> None:
    """Block for block the mask of the whole sequence; balanced, every rank computes as much as any other.

    With a window, blocks have neither a query that sees nothing nor a key that nobody sees.
    """
    size, length, spec = 4, 6, AttentionSpec(window=window)
    order = unshard_sequence(torch.arange(24), dim=0, size=size, balanced=balanced).argsort()
    mask = spec.sees(order[:, None], order)  # rows and columns as ranks hold them
    work = []
    for rank in range(size):
        seen = torch.zeros(length, size * length, dtype=torch.bool)
        part = SequencePart("", rank, size, balanced)
        for source in range(size):
            sources, tiles = range(source, source + 1), seen.split(length, dim=1)
            for block in visible(sources, part=part, length=length, spec=spec):
                tile = tiles[source][block.queries, block.keys]
                how = ring.visible_keys(block, sources, None, part, spec, tile.device)
                queries, keys = (torch.arange(n) for n in tile.shape)
                of_block = how["spec"].sees(queries[:, None], keys)
                of_block = of_block if how["mask_BST"] is None else how["mask_BST"][0]
                assert of_block.any(0).all() and of_block.any(1).all()
                tile |= of_block
        assert torch.equal(seen, mask[rank * length : (rank + 1) * length])
        work.append(int(seen.sum()))
    if not window:
        assert work == ([75] * 4 if balanced else [21, 57, 93, 129])


def test_lengths_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"sequence of 100 .* multiple of 8 .*; try 96 or 104$"
    ):
        check_divides(100, size=4, balanced=True)
    with pytest.raises(ValueError, match=r"multiple of 4 \(the number of ranks\); try 4$"):
        shard_sequence(torch.arange(3), dim=0, rank=0, size=4, balanced=False)
    check_divides(100, size=4, balanced=False)


class Scaled(PlainAttention):
    """Computes something else, and does not say otherwise itself."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.9)


def _replaced(method: Any) -> list[str] | str:
    """Types of what a module with one attention under two names holds afterwards, or the refusal."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    net = nn.Module()
    net.plain, net.first = PlainAttention(), Scaled()
    net.second = net.first
    try:
        apply_cp(net, mesh=mesh, attention_type=PlainAttention, method=method)
    except ValueError as error:
        assert type(net.plain) is PlainAttention, (
            "nothing is replaced where something is refused"
        )
        return str(error)
    return [type(child).__name__ for child in net._modules.values()]


def test_what_is_no_causal_softmax_is_not_replaced_by_it(pool) -> None:
    for method in ("ring", "allgather"):
        (refusal,) = pool.run(1, _replaced, method)
        assert (
            f"by {method} computes causal softmax" in refusal
            and "in place of Scaled" in refusal
        )
    assert pool.run(1, _replaced, "ulysses") == [["ContextParallelAttention"] * 3]


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    messages = []

    def refuse(
        method: Any, attention_type: type[nn.Module], heads: int, value_size: int = 8
    ) -> None:
        net = Net()
        qkv, _, ids = _inputs(length=4, heads=heads, groups=heads, dtype=torch.float32)
        qkv[2] = _wide(qkv[2], value_size)
        with pytest.raises(ValueError) as error:
            apply_cp(net, mesh=mesh, attention_type=attention_type, method=method)
            net(*qkv, ids=ids)
        messages.append(str(error.value))

    refuse("ulysses", PlainAttention, 3)
    refuse("spiral", PlainAttention, 2)
    refuse("ring", nn.LSTM, 2)
    refuse("ulysses", PlainAttention, 2, value_size=9)
    return messages


def test_refusals_name_the_way_out(pool) -> None:
    for heads, method, missing, sizes in pool.run(2, _refusals):
        assert "3 query heads" in heads and "to 2 context parallel ranks" in heads
        assert "'spiral'" in method and "('ring', 'allgather', 'ulysses')" in method
        assert missing == "context parallelism found no LSTM in Net"
        assert sizes.startswith(
            "blocks.0.attention: heads of queries, keys and values have sizes 8, 8, 9;"
        )
