"""Jobs with experts: what is sent and held against real runs with balanced routes, assumed imbalance, and shallow traces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.support.tables import table
from tests.support.traces import (
    bytes_of,
    count_real_transfers,
    counts_of,
    in_turn,
    job,
    on_cpu,
    real_peak,
    trace_ranks,
    traced_peak,
)
from titan.base.hardware import MARGIN
from titan.config.schema import JobConfig
from titan.sim.price.cost import matmul_sizes
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Launch, Synchronize, Transfer
from titan.sim.replay.memory import memory_report
from titan.sim.report import imbalance, text
from titan.sim.report.imbalance import simulate_with_limit, with_imbalance
from titan.sim.report.text import page
from titan.sim.routing import most_imbalance
from titan.sim.simulate import Simulation, facts, simulate

EP, TP, CP, PP = (
    f"{axis}_parallel_degree" for axis in ("expert", "tensor", "context", "pipeline")
)


MOE: dict[str, Any] = {"name": "qwen3", "flavor": "tiny_moe"}


def moe_job(**sections: Any) -> JobConfig:
    return job(**{"model": MOE, "debug": {"moe_force_load_balance": True}, **sections})


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "layouts")


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
MEMORY: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "memory")


@pytest.mark.parametrize("name", in_turn(MEMORY, slow=[*MEMORY][3:]))
def test_peak_is_the_real_one(name: str, pool: Pool) -> None:
    world, sections = MEMORY[name]
    # Large enough that the peak is in the forward or backward pass: clipping squares gradients one by one on a CPU only.
    config = moe_job(batch=16, **sections)
    real = pool.run(world, real_peak, config)[0]
    trace = trace_ranks(config, world_size=world, ranks=[0], prepare=on_cpu)[0]
    assert traced_peak(trace) == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_router_multiplies_16_bits_into_fp32(compiled: bool) -> None:
    config = moe_job(batch=8, training=BF16, compile={"enable": compiled})
    [trace] = trace_ranks(config, world_size=1, ranks=[0]).values()
    launches = [e for e in trace.step if isinstance(e, Launch) and e.kernel.kind == "matmul"]
    found = [e for e in launches if e.scope.module.startswith("layers.0.moe.router")]
    [forward] = [e.kernel for e in found if e.scope.phase == "forward"]
    (tokens, dim), (_, experts) = forward.shapes
    assert (tokens, dim, forward.dtype) == (8 * 64, 64, "bfloat16")
    assert forward.flops == 2 * tokens * dim * experts
    assert forward.read_bytes == 2 * dim * (tokens + experts)
    assert forward.write_bytes == 4 * tokens * experts
    assert [e.kernel.dtype for e in found if e.scope.phase == "backward"] == 2 * ["float32"]


def uneven_job(**sections: dict[str, Any]) -> JobConfig:
    """Experts' rows are most of the memory."""
    model = {"overrides": {"n_layers": 2, "expert_dim": 512}}
    training = {**BF16, "seq_len": 512, "local_batch_size": 8}
    return moe_job(
        **{"parallelism": {EP: 4}, "model": MOE | model, "training": training, **sections}
    )


def peak(config: JobConfig) -> int:
    [trace] = trace_ranks(config, world_size=4, ranks=[0]).values()
    return memory_report(trace, load_profile("h100-sxm")).peak_reserved_bytes


def peak_of(simulation: Simulation) -> int:
    return simulation.fullest.peak_reserved_bytes


def test_the_limit_of_uneven_routing_fits_and_a_tenth_more_does_not() -> None:
    profile = load_profile("h100-sxm")
    config = uneven_job()
    even, worst = (peak(with_imbalance(config, x)) for x in (1, 4))
    assert worst > 1.5 * even
    # A device with room for a part of the difference.
    outside = simulate(config, world_size=4, profile=profile).fullest.outside_bytes
    gib = (even + 0.4 * (worst - even) + outside) / 2**30
    small = profile.model_copy(update={"memory_gib": gib / (1 - MARGIN)})
    limit = simulate_with_limit(config, world_size=4, profile=small).fits_up_to
    assert limit is not None and 1 < limit < most_imbalance(config, config.model.sizes) == 4

    def fits(imbalance: float) -> bool:
        uneven = with_imbalance(config, imbalance)
        return simulate(uneven, world_size=4, profile=small).fits

    assert fits(limit) and not fits(limit + 0.1)
    ends = [simulate(with_imbalance(config, n), world_size=4, profile=profile) for n in (1, 4)]
    [between] = imbalance._between(*ends, share=0.5)
    assert between.peak_reserved_bytes == peak(with_imbalance(config, 2.5))
    # Work in another order, as a compiler may find with other sizes: on a line.
    ends[1].traces[0].step.reverse()
    [line] = imbalance._between(*ends, share=0.5)
    assert line.peak_reserved_bytes == (peak_of(ends[0]) + peak_of(ends[1])) // 2
    assert line.peak_reserved_bytes == pytest.approx(between.peak_reserved_bytes, rel=0.04)


def test_a_burst_is_a_tail_of_the_steps() -> None:
    """W7: a quarter of the experts is hot in one step of eight. Median and mean do not show what that step needs."""
    config = uneven_job(debug={}, simulator={"routing": "W7"})
    how = {"world_size": 4, "profile": load_profile("h100-sxm")}
    simulation = simulate_with_limit(config, **how)
    routed = facts(simulation)["experts"]["routed"]
    burst = simulate(with_imbalance(config, round(routed["load_p99"], 2)), **how)
    assert 1 < routed["load_mean"] < 1.5 < 3 < routed["load_p99"]
    assert routed["step_s_p99"] == pytest.approx(burst.timeline.step_s)
    assert routed["step_s_even"] <= routed["step_s_p50"] <= routed["step_s_p99"]
    assert routed["needed_gib_p99"] > 0.1 + simulation.fullest.needed_bytes / 2**30
    assert routed["needed_gib_p99"] == burst.fullest.needed_bytes / 2**30
    page = text.page(facts(simulation))
    assert f"and at most {routed['load_p99']:.2f} in 99 of 100" in page


def test_chunks_bound_what_uneven_routing_costs() -> None:
    """In chunks of rows, the experts' hidden states exist for one chunk at a time; the rows themselves stay."""
    chunked, plain = uneven_job(moe={"expert_chunk_rows": 2048}), uneven_job()
    added, added_plain = (
        peak(with_imbalance(config, 4)) - peak(with_imbalance(config, 1))
        for config in (chunked, plain)
    )
    rows = 3 * 8 * 512 * 2  # that arrive beyond the mean
    # Per row and layer: w1 x, w3 x, silu, product, and the row; the row alone.
    assert added_plain > 2 * rows * 2 * (4 * 512 + 64)
    assert added < added_plain / 4


def test_the_host_waits_once_in_each_layer() -> None:
    config = moe_job(parallelism={EP: 2}, activation_checkpoint={"mode": "full"})
    [trace] = trace_ranks(config, world_size=2, ranks=[0]).values()
    waits = [e for e in trace.step if isinstance(e, Synchronize) and "rows" in e.reason]
    assert len(waits) == 4  # the recomputation knows the counts


def test_grouped_products_are_priced_as_a_batch() -> None:
    config = moe_job(parallelism={EP: 2}, training=BF16)
    [trace] = trace_ranks(config, world_size=2, ranks=[0]).values()
    launches = [e for e in trace.step if isinstance(e, Launch)]
    products = [e.kernel for e in launches if e.kernel.name == "aten::_grouped_mm"]
    # 4 sequences of 64 tokens for 2 experts each: 512 rows, 128 for each of the rank's 4 experts; width 64.
    assert len(products) == 4 * 3 * 3
    assert {k.flops for k in products} == {2 * 512 * 64 * 64}
    assert {matmul_sizes(k) for k in products} == {(4, 128, 64, 64), (4, 64, 128, 64)}


def test_gathering_experts_ahead_saves_waiting() -> None:
    """Their gathering starts before the wait of the host for their rows, and not behind it."""
    profile = load_profile("h100-sxm")
    wait_s = {}
    for prefetch in (-1, 0):
        settings = {EP: 8, "fsdp_prefetch": prefetch}
        model = {"overrides": {"n_layers": 4, "num_experts": 8, "expert_dim": 2048}}
        config = moe_job(parallelism=settings, model=MOE | model, training=BF16)
        wait_s[prefetch] = (
            simulate(config, world_size=16, profile=profile)
            .timeline.ranks[0]
            .exposed_s["efsdp"]
        )
    assert wait_s[-1] < wait_s[0] / 2


def test_routing_sets_rows_time_and_memory() -> None:
    """The busiest rank gets more rows than it sends, and sends as many back: both ways cost what the larger part does."""
    profile = load_profile("h100-sxm")
    configs = uneven_job(), uneven_job(debug={}, simulator={"routing": "zipf:0.9"})
    even, uneven = (simulate(config, world_size=4, profile=profile) for config in configs)
    factor = uneven.busiest_rank
    assert even.busiest_rank == 1 and 1.2 < factor < 2
    sizes = [
        sorted(
            e.size_bytes
            for e in trace.step
            if isinstance(e, Transfer) and e.kind == "all_to_all"
        )
        for simulation in (even, uneven)
        for trace in simulation.traces.values()
    ]
    rows = 8 * 512 * 2 * 64 * 2  # sequences, tokens, experts of a token, width, bytes
    assert sizes[0][-8:] == [rows] * 8  # there and back, forward and backward, in two layers
    assert sizes[1][-8:] == [pytest.approx(factor * rows, rel=1e-3)] * 8
    # The step waits for the host, so small is the job; its kernels and exchanges take longer.
    assert uneven.timeline.ranks[0].compute_s > even.timeline.ranks[0].compute_s
    assert uneven.fullest.peak_reserved_bytes > even.fullest.peak_reserved_bytes
    waits = [sum(s.timeline.ranks[0].waiting_s.values()) for s in (even, uneven)]
    assert waits[1] > 2 * waits[0] > 0
    said = facts(uneven)
    assert (said["experts"]["routing"], said["experts"]["imbalance"]) == ("zipf:0.9", factor)
    assert said["comm"]["waiting_s"]["all_to_all"] > 0
    assert f"assumed: the busiest gets {factor:g} times the mean load of the 4 ranks" in page(
        said
    )
