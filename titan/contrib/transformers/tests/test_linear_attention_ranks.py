"""Linear attention and its convolution over context parallel ranks, against one process.

Errors are the largest difference over the largest value of the same tensor: loss, and the gradients of the input and of each weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.linear_attention import KINDS, Kind, largest_error, plant
from tests.support.ranks import Pool
from titan.contrib.transformers.linear_attention import LinearAttention
from titan.contrib.transformers.short_convolution import short_convolution
from titan.models.common.attention import InnerAttention
from titan.parallel.activation import apply_ac
from titan.parallel.context import apply_cp, mask_over_ranks, sequence_part, shard_sequence
from titan.parallel.documents import share_document_mask

HEADS, GROUPS, KEY, VALUE, WIDTH = 4, 2, 8, 6, 16


class Layer(nn.Module):
    """Projections, convolution and recurrence of one layer."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.sizes = [GROUPS * KEY, GROUPS * KEY, HEADS * VALUE]
        self.wide = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        channels = sum(self.sizes)
        self.convolution = nn.Conv1d(channels, channels, 4, groups=channels)
        self.gates = nn.Linear(
            WIDTH, HEADS * (KEY if kind.gates == "channel" else 1), bias=False
        )
        self.betas = nn.Linear(WIDTH, HEADS, bias=False)
        self.inner = LinearAttention(chunk=8)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x_BSD: Tensor, ids: Any = None) -> Tensor:
        weight_DW, bias_D = self.convolution.weight[:, 0], self.convolution.bias
        borders, wide_BSD = self.inner.borders, self.wide(x_BSD)
        mixed = F.silu(
            short_convolution(wide_BSD, weight_DW, bias_D, borders, document_ids_BS=ids)
        )
        q, k, v = (
            x.unflatten(-1, (heads, -1)).transpose(1, 2)
            for x, heads in zip(
                mixed.split(self.sizes, -1), (GROUPS, GROUPS, HEADS), strict=True
            )
        )
        gates = F.logsigmoid(self.gates(x_BSD)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        gates = {"head": gates[..., 0], "channel": gates, "": None}[self.kind.gates]
        betas = self.betas(x_BSD).sigmoid().transpose(1, 2) if self.kind.delta else None
        out = self.inner(q, F.normalize(k, dim=-1), v, gates, betas, ids)
        return x_BSD + self.out(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, kind: Kind, dtype: torch.dtype = torch.float32, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers))
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (drawn * 0.4).to(dtype)

    def forward(self, x_BSD: Tensor, *, document_ids_BS: Any = None) -> Tensor:
        for layer in self.layers:
            x_BSD = layer(x_BSD, document_ids_BS)
        return x_BSD


def _results(net: nn.Module, x: Tensor, targets: Tensor, count: int, ids: Any) -> list[Tensor]:
    """The loss, and the gradients of the input and of the weights that have one."""
    x = x.clone().requires_grad_()
    loss = (net(x, document_ids_BS=ids) - targets).pow(2).sum() / count
    loss.backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert x.grad is not None
    return [x.grad, loss.detach(), *grads]


def _documents(documents: str, length: int) -> Tensor | None:
    """Ids: of short documents, of documents that span pieces, or of documents that begin where pieces begin. Samples differ."""
    if not documents:
        return None
    starts = torch.rand(3, length, generator=torch.Generator().manual_seed(9))
    starts = starts < {"short": 0.3, "long": 0.03, "borders": 0.0}[documents]
    if documents == "borders":
        starts[0, :: length // 4] = starts[1, :: length // 8] = True
    return starts.long().cumsum(1)


def _error(
    name: str,
    *,
    balanced: bool,
    documents: str = "",
    length: int = 80,
    dtype: torch.dtype = torch.float32,
    shared: bool = False,
    change: str = "",
    fault: str = "",
) -> float:
    """Return the results of this rank. `shared`: the documents come as the mask of one forward pass. `change`: "recomputed" or "compiled"."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    split = {"rank": mesh.get_local_rank(), "size": world, "balanced": balanced}
    generator = torch.Generator().manual_seed(5)
    x, targets = torch.randn(2, 3, length, WIDTH, generator=generator).to(dtype)
    ids = _documents(documents, length)
    layers = 1 if change == "compiled" else 2
    theirs = _results(Net(KINDS[name], dtype, layers), x, targets, x.numel(), ids)
    theirs[0] = shard_sequence(theirs[0], dim=1, **split)
    net = Net(KINDS[name], dtype, layers)
    apply_cp(net, mesh=mesh, attention_type=InnerAttention, balanced=balanced)
    if shared:
        part = sequence_part(mesh, balanced=balanced)
        share_document_mask(net, partial(mask_over_ranks, part=part, method="allgather"))
    if change == "recomputed":
        apply_ac(net, keep=())
    if change == "compiled":
        net.compile(backend="aot_eager", fullgraph=True)
    local: Any = [
        None if y is None else shard_sequence(y, dim=1, **split) for y in (x, targets, ids)
    ]
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        mine = _results(net, local[0], local[1], x.numel(), local[2])
    for partial_sum in mine[1:]:
        dist.all_reduce(partial_sum)
    return largest_error(mine, theirs)


def _errors(cases: list[tuple[str, dict[str, Any]]]) -> list[float]:
    return [_error(name, **options) for name, options in cases]


def _check(pool: Pool, world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for errors in pool.run(world, _errors, cases):
        for case, error in zip(cases, errors, strict=True):
            # A mistake in the tenth digit would hide in fp32.
            assert error < (1e-12 if "dtype" in case[1] else 1e-5), (case, error)


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(pool: Pool, world: int) -> None:
    documents = ({}, {"documents": "borders"})
    exact = [{"documents": name, "dtype": torch.float64} for name in ("short", "long")]
    cases = [
        (name, {"balanced": balanced, **options})
        for name in (KINDS if world == 2 else ("gated delta", "kda", "ssd"))
        for balanced in (True, False)
        for options in (*documents, *exact)
    ]
    _check(pool, world, cases)


def test_pieces_that_are_shorter_than_a_chunk_or_no_multiple_of_it(pool: Pool) -> None:
    cases = [
        (name, {"balanced": balanced, "documents": documents, "length": length})
        for name in ("kda", "delta")
        for balanced in (True, False)
        for documents in ("", "long")
        for length in (16, 88)
    ]
    _check(pool, 2, cases)


def test_one_mask_for_all_layers_and_recomputed(pool: Pool) -> None:
    options = {"documents": "long", "shared": True}
    cases = [
        ("gated delta", {"balanced": True, **options}),
        ("gated delta", {"balanced": False, "change": "recomputed", **options}),
    ]
    _check(pool, 2, cases)


def test_compiles_without_a_graph_break(pool: Pool) -> None:
    options = {"balanced": True, "documents": "long", "change": "compiled"}
    _check(pool, 2, [("gated delta", options)])


FAULTS = {
    "a state that is not passed": "",
    "tokens that are not passed": "",
    "a state that leaks over a document": "borders",
    "a gate applied twice": "",
}


def test_planted_faults_are_seen(pool: Pool) -> None:
    cases = [
        ("gated delta", {"balanced": balanced, "documents": documents, "fault": fault})
        for balanced in (True, False)
        for fault, documents in FAULTS.items()
    ]
    for case, *errors in zip(cases, *pool.run(2, _errors, cases), strict=True):
        assert max(errors) > 1e-3, (case, errors)


def _refusal() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    net = Net(KINDS["ssd"])
    apply_cp(net, mesh=mesh, attention_type=InnerAttention)
    with pytest.raises(ValueError) as refused:
        net(torch.zeros(1, 4, WIDTH))
    return str(refused.value)


def test_pieces_that_are_shorter_than_the_convolution_are_refused(pool: Pool) -> None:
    for message in pool.run(2, _refusal):
        assert (
            message.startswith("context parallelism leaves pieces of 2 tokens")
            and "3 tokens" in message
        )
