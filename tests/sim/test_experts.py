"""Jobs with experts: what is sent and held against real runs with balanced routes, assumed imbalance, and shallow traces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.support.traces import (
    bytes_of,
    count_real_transfers,
    counts_of,
    in_turn,
    job,
    real_peak,
    traced_peak,
)
from titan.config.schema import JobConfig
from titan.sim.trace_jobs import trace_ranks

EP, TP, CP, PP = (f"{axis}_parallel_degree" for axis in ("expert", "tensor", "context", "pipeline"))
REPLICAS = "data_parallel_replicate_degree"


def moe_job(**sections: Any) -> JobConfig:
    model = {"name": "qwen3", "flavor": "tiny_moe"}
    return job(model=model, debug={"moe_force_load_balance": True}, **sections)


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


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", in_turn(LAYOUTS, slow=[*LAYOUTS][3:]))
def test_trace_sends_what_is_really_sent(name: str, mode: str, pool: Pool) -> None:
    world, settings = LAYOUTS[name]
    config = moe_job(parallelism=settings, activation_checkpoint={"mode": mode})
    real = pool.run(world, count_real_transfers, config)
    traces = trace_ranks(config, world_size=world, ranks=range(world), processes=2)
    for rank, (counts, sizes) in enumerate(real):
        assert counts_of(traces[rank]) == counts, rank
        assert bytes_of(traces[rank]) == sizes, rank


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
