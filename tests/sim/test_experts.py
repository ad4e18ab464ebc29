"""Jobs with experts: what is sent and held against real runs with balanced routes, assumed imbalance, and shallow traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Pool
from tests.support.traces import (
    bytes_of,
    count_transfers_of,
    counts_of,
    in_turn,
    job,
    peak_of,
    real_program,
    traced_peak,
)
from titan.config.schema import JobConfig
from titan.models.moe import MoE
from titan.parallelize import moes_of
from titan.sim.trace_jobs import trace_ranks
from titan.train_step import TrainStep

EP, TP, CP, PP = (f"{axis}_parallel_degree" for axis in ("expert", "tensor", "context", "pipeline"))
REPLICAS = "data_parallel_replicate_degree"


def moe_job(**sections: dict[str, Any]) -> JobConfig:
    model = {"name": "qwen3", "flavor": "tiny_moe"}
    return job(model=model, **sections)


class Even:
    """Sends as many rows to each expert, and from each rank to each rank."""

    def get(self, moe: MoE, tokens: Tensor) -> Tensor:
        ids = torch.arange(tokens[..., 0].numel() * moe.config.top_k) % moe.config.num_experts
        return ids.view(-1, moe.config.top_k)

    def put(self, moe: MoE, ids_TK: Tensor) -> None: ...


def balanced_program(config: JobConfig) -> TrainStep:
    program = real_program(config)
    for part in program.model_parts:
        for moe in moes_of(part).values():
            moe.route_sources.append(Even())
    return program


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP 2": (2, {EP: 2}),
    "EP 2, FSDP 2": (4, {EP: 2}),
    "EP 4": (4, {EP: 4}),
    "EP 2, HSDP": (4, {EP: 2, REPLICAS: 2}),
    "EP 2, TP": (2, {EP: 2, TP: 2}),
    "EP 4, TP": (4, {EP: 4, TP: 2}),
    "EP 1, TP": (2, {TP: 2}),
    "EP 2, CP": (2, {EP: 2, CP: 2}),
    "EP 2, PP": (4, {EP: 2, PP: 2}),
}


def count_transfers(config: JobConfig) -> Any:
    return count_transfers_of(balanced_program(config), config)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", in_turn(LAYOUTS, slow=[*LAYOUTS][3:]))
def test_trace_sends_what_is_really_sent(name: str, mode: str, pool: Pool) -> None:
    world, settings = LAYOUTS[name]
    config = moe_job(parallelism=settings, activation_checkpoint={"mode": mode})
    real = pool.run(world, count_transfers, config)
    traces = trace_ranks(config, world_size=world, ranks=range(world), processes=2)
    for rank, (counts, sizes) in enumerate(real):
        assert counts_of(traces[rank]) == counts, rank
        assert bytes_of(traces[rank]) == sizes, rank


def real_peak(config: JobConfig) -> int:
    return peak_of(balanced_program, config)


BF16: dict[str, Any] = {"mixed_precision_param": "bfloat16"}
MEMORY: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"training": BF16}),
    "one rank, fp32": (1, {}),
    "EP 2": (2, {"parallelism": {EP: 2}, "training": BF16}),
    "EP 2, full AC": (
        2,
        {
            "parallelism": {EP: 2},
            "training": BF16,
            "activation_checkpoint": {"mode": "full"},
        },
    ),
    "EP 4, TP": (4, {"parallelism": {EP: 4, TP: 2}, "training": BF16}),
    "EP 2, fp32": (2, {"parallelism": {EP: 2}}),
    "EP 2, FSDP 2": (4, {"parallelism": {EP: 2}, "training": BF16}),
}


@pytest.mark.parametrize("name", in_turn(MEMORY, slow=[*MEMORY][3:]))
def test_peak_is_the_real_one(name: str, pool: Pool) -> None:
    world, sections = MEMORY[name]
    config = moe_job(**sections)
    real = pool.run(world, real_peak, config)[0]
    trace = trace_ranks(config, world_size=world, ranks=[0], device_kind="cpu")[0]
    assert traced_peak(trace) == pytest.approx(real, rel=0.002)
