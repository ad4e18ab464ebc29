"""scripts/published_compat.py imitates torch 2.6 and models of its time, to the byte and to the event."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from scripts.published_compat import (
    _forward_qwen3,
    _norm_in_operations,
    _rotate_complex,
    emulate,
    emulate_torch_2_6,
)
from tests.support.traces import job, left_behind, trace_ranks
from titan.config.schema import JobConfig
from titan.models.common.rotary import rotate, rotation_table
from titan.models.qwen3.config import FLAVORS
from titan.models.qwen3.model import Attention
from titan.sim.record.trace import AwaitWork, Launch, Trace, Transfer

# To the byte and to the event with these; scripts/published_compat.py says what is other since.
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15),
    reason="torch 2.15 reduces, and compiles, in an order of its own",
)

BF16: dict[str, Any] = {"mixed_precision_param": "bfloat16"}


def both(config: JobConfig, *, world: int, rank: int) -> list[Trace]:
    """Traces of today's program, and of torch 2.6's."""
    how = (None, emulate_torch_2_6)
    return [trace_ranks(config, world_size=world, ranks=[rank], prepare=p)[rank] for p in how]


@pytest.mark.parametrize("stage", [0, 1])
def test_pipelines_held_more(stage: int) -> None:
    """From one step to the next: all outputs, and the fp32 gradients of the stage's last unit."""
    pipeline = {"pipeline_parallel_degree": 2}
    config = job(training=BF16, parallelism=pipeline, loss={"chunk_output": False})
    held = [
        sum(e.size_bytes for e in left_behind(trace))
        for trace in both(config, world=4, rank=2 * stage)
    ]
    model = config.model.sizes
    tokens = config.training.local_batch_size * config.training.seq_len
    outputs = tokens * (model.vocab_size if stage else model.dim) * 2
    last = model.num_embedding_params + model.dim if stage else model.num_block_params
    assert held[1] - held[0] == outputs + 4 * last


@pytest.mark.parametrize("method", ["allgather", pytest.param("ring", marks=pytest.mark.slow)])
def test_compiled_context_parallelism_hid_nothing(method: str) -> None:
    parallelism = {
        "context_parallel_degree": 4,
        "context_parallel_rotate_method": method,
        "data_parallel_shard_degree": 1,
    }
    compiled = {"enable": True, "components": ["model"]}
    config = job(layers=2, training=BF16, parallelism=parallelism, compile=compiled)
    hidden, old = (launches_meanwhile(trace) for trace in both(config, world=4, rank=0))
    assert len(old) == len(hidden) and sum(hidden) > 0 == sum(old)


def launches_meanwhile(trace: Trace) -> list[int]:
    """Kernels that are issued between the start of each functional collective of attention and its wait."""
    counts: list[int] = []
    under_way: dict[int, int] = {}
    for event in trace.step:
        if isinstance(event, Transfer) and "inner_attention" in event.scope.module:
            under_way[event.work] = 0
        elif isinstance(event, Launch):
            under_way = {work: count + 1 for work, count in under_way.items()}
        elif isinstance(event, AwaitWork) and event.work in under_way:
            counts.append(under_way.pop(event.work))
    return counts


def test_qwen3_gathered_its_queries_and_keys() -> None:
    """In forward and recomputation of each block, a gather of all queries and one of all keys. Gradients stay cut."""
    config = job(
        model={"name": "qwen3", "flavor": "tiny"},
        layers=2,
        training=BF16,
        parallelism={"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
        activation_checkpoint={"mode": "full"},
        compile={"enable": False},
    )
    model = config.model.sizes
    now, then = (
        trace_ranks(config, world_size=2, ranks=[0], prepare=how)[0] for how in (None, emulate)
    )
    tokens = config.training.local_batch_size * config.training.seq_len
    for heads in (model.n_heads, model.n_kv_heads):
        size = tokens * heads * model.head_dim * 2
        added = [gathers(trace, size) for trace in (now, then)]
        assert added[1] == added[0] + 2 * model.n_layers


def gathers(trace: Trace, size_bytes: int) -> int:
    return sum(
        isinstance(e, Transfer) and e.kind == "all_gather" and e.size_bytes == size_bytes
        for e in trace.step
    )


def test_qwen3_computes_the_same() -> None:
    """The imitated attention has the output and the gradients of titan's."""
    torch.manual_seed(0)
    attention = Attention(FLAVORS["tiny"])
    x = torch.randn(2, 16, FLAVORS["tiny"].dim)
    angles = torch.randn(FLAVORS["tiny"].head_dim // 2)
    cos_sin: Any = rotation_table(torch.arange(16), angles)[:, None].chunk(2, dim=-1)
    results = []
    for forward in (Attention.forward, partial(_forward_qwen3, attention)):
        attention.zero_grad()
        bound = forward if isinstance(forward, partial) else partial(forward, attention)
        output = bound(x, cos_sin, None)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in attention.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_norms_in_operations_compute_the_same() -> None:
    norm = torch.nn.RMSNorm(32, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 32)
    torch.testing.assert_close(_norm_in_operations(norm, x), norm(x))


def test_complex_rotation_turns_neighbours() -> None:
    """Channels 2i and 2i + 1 by the angle by which titan turns channels i and i + K/2."""
    x, frequencies, positions = torch.randn(2, 16, 3, 8), torch.randn(4), torch.arange(16)
    angles = positions[:, None] * frequencies
    turned = _rotate_complex(x, torch.polar(torch.ones(16, 4), angles)[:, None])
    apart = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    cos, sin = rotation_table(positions, frequencies)[:, None].chunk(2, dim=-1)
    ours = rotate(apart, (cos, sin))
    torch.testing.assert_close(torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1), ours)
