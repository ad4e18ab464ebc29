"""scripts/published_compat.py imitates torch 2.6, to the byte and to the event."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.published_compat import emulate_torch_2_6
from tests.support.traces import job, left_behind
from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.sim.trace import AwaitWork, Launch, Trace, Transfer
from titan.sim.trace_jobs import trace_ranks

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
    """From one step to the next: all outputs, and the fp32 gradients of the stage's last block."""
    pipeline = {"pipeline_parallel_degree": 2}
    config = job(training=BF16, parallelism=pipeline, loss={"chunk_output": False})
    held = [
        sum(e.size_bytes for e in left_behind(trace))
        for trace in both(config, world=4, rank=2 * stage)
    ]
    model = model_config(config.model)
    tokens = config.training.local_batch_size * config.training.seq_len
    outputs = tokens * (model.vocab_size if stage else model.dim) * 2
    assert held[1] - held[0] == outputs + 4 * model.num_block_params


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
