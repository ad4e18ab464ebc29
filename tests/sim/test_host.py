"""The host takes time: its work is counted on a tiny step, shared by jobs of one program, and paces the replay."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.synthetic import FixedCost, kernel
from tests.support.tables import tabled
from tests.support.traces import job
from titan.checks.rules import resolve_layout
from titan.config.load import load_from_argv
from titan.config.schema import JobConfig
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record import trace_cache
from titan.sim.record.host_meter import CALL, OPERATION, UPDATE_CALL, HostMeter, paces
from titan.sim.record.host_time import tiny
from titan.sim.record.trace import Event, Group, Launch, Scope, Trace, Transfer
from titan.sim.record.trace_cache import TraceRequest, get_traces
from titan.sim.record.trace_jobs import Job, trace_jobs
from titan.sim.replay.queues import replay

DP = Group("dp", ("dp_shard",), (0, 1))
TP = Group("tp", ("tp",), (0, 2))
MOE = {"name": "deepseek_v3", "flavor": "16B"}


# ---- the meter -------------------------------------------------------------------------------------


def test_calls_are_charged_to_the_part_that_runs() -> None:
    meter = HostMeter()

    def work(times: int) -> None:
        for _ in range(times):
            (lambda: None)()

    sys.setprofile(meter.profile)
    try:
        work(50)
        with meter.within("forward block"):
            work(200)
            with meter.within("forward hooks"):
                work(70)
            work(80)
    finally:
        sys.setprofile(None)
    expected = {"forward": 50, "forward block": 280, "forward hooks": 70}
    # The meter's own calls are a few.
    assert meter.python == pytest.approx(expected, abs=15)


def test_comparisons_are_not_counted() -> None:
    """How many a lookup makes follows from the places of keys in a hash table."""
    meter = HostMeter()

    class Key:
        def __eq__(self, other: object) -> bool:
            return all(self is one for one in (other, other))

        __hash__ = None  # type: ignore[assignment]

    def compare(times: int) -> int:
        keys = [Key() for _ in range(times)]
        sys.setprofile(meter.profile)
        try:
            assert Key() not in keys
            (lambda: None)()
        finally:
            sys.setprofile(None)
        return meter.python.total()

    assert 1 <= compare(3) < 5
    first = meter.python.total()
    assert compare(300) == 2 * first


def test_a_blocks_pace_counts_calls_and_others_count_events() -> None:
    python = {"forward": 600, "forward block": 900, "forward hooks": 300, "optimizer": 80}
    events = {"forward": 12, "forward block": 70, "optimizer": 4}
    found = paces(python, {"forward": 20, "forward block": 30}, events, 3)
    assert found == pytest.approx(
        {
            "forward": (CALL * 600 + OPERATION * 20) / 12,
            # A block's own hooks are part of it.
            "forward block": (CALL * 1200 + OPERATION * 30) / 3,
            "forward hooks": CALL * 300 / 3,
            "optimizer": UPDATE_CALL * 20,
        }
    )


COUNT = """
import json, sys
from titan.config.schema import JobConfig
from titan.sim.record.host_meter import count_job
from titan.sim.record.host_time import tiny
from titan.checks.rules import resolve_layout

found = []
for sections, world in json.loads(sys.argv[1]):
    config = JobConfig.model_validate(sections).on_device("cpu")
    found.append(count_job(*tiny(config, resolve_layout(config, world))))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def by_calls() -> dict[str, dict[str, float]]:
    """Return paces of tiny jobs."""
    tensor, many = {"parallelism": {"tensor_parallel_degree": 2}}, {"model": {"overrides": {"n_layers": 8}}}  # fmt: skip
    jobs: dict[str, tuple[dict[str, Any], int]] = {
        "FSDP": ({}, 2),
        "FSDP again": ({}, 2),
        "eight blocks": (many, 2),
        "no FSDP": ({}, 1),
        "TP": (tensor, 4),
        "full AC": ({"activation_checkpoint": {"mode": "full"}}, 2),
        "experts": ({"model": MOE}, 2),
        "EP": ({"model": MOE, "parallelism": {"expert_parallel_degree": 2}}, 2),
    }
    base = {"model": {"flavor": "8B"}, "training": {"mixed_precision_param": "bfloat16"}}
    asked = [({**base, **sections}, world) for sections, world in jobs.values()]
    for sections, _ in asked:
        sections["model"] = {"flavor": "8B", **sections["model"]}
    command = [sys.executable, "-c", COUNT, json.dumps(asked)]
    done = finished(command, cwd=ROOT)
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_every_block_costs_as_much_as_the_next(by_calls: dict[str, dict[str, float]]) -> None:
    """Twice the blocks take twice the time, and a job always as long as before."""
    assert by_calls["FSDP again"] == by_calls["FSDP"]
    eight, four = by_calls["eight blocks"], by_calls["FSDP"]
    for part in ("forward block", "backward block"):
        # The last block stays gathered, and is an eighth of eight blocks and a quarter of four.
        assert eight[part] == pytest.approx(four[part], rel=0.1), part


def test_what_a_layout_adds_to_a_block(by_calls: dict[str, dict[str, float]]) -> None:
    def block(name: str) -> float:
        return by_calls[name]["forward block"] + by_calls[name]["backward block"]

    # DTensor computes placements in Python, and FSDP's hooks are Python.
    assert block("TP") > 1.2 * block("FSDP") and block("FSDP") > 1.2 * block("no FSDP")
    # A recomputation is a second forward pass, without its hooks.
    again = by_calls["full AC"]["backward block"] - by_calls["FSDP"]["backward block"]
    assert again > 0.9 * by_calls["no FSDP"]["forward block"]
    assert block("EP") > block("experts") > block("FSDP")


def test_hash_seeds_change_no_count() -> None:
    """DTensor's lookups compare other keys with another seed."""
    sections = {
        "model": {"flavor": "8B"},
        "training": {"mixed_precision_param": "bfloat16"},
        "parallelism": {"tensor_parallel_degree": 2},
    }
    command = [sys.executable, "-c", COUNT, json.dumps([(sections, 8)])]
    one, other = (
        finished(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    )
    assert one.splitlines()[-1] == other.splitlines()[-1]


# ---- who shares a measurement ----------------------------------------------------------------------


def key(config: JobConfig, world: int) -> str:
    layout = resolve_layout(config, world)
    return TraceRequest(*tiny(config, layout), of_host=True).key


def test_sizes_share_a_measurement_and_programs_do_not() -> None:
    base = key(job(), 8)
    for same in (
        key(job(batch=2), 8),
        key(job(layers=8), 8),
        key(job(training={"seq_len": 4096, "global_batch_size": 64}), 8),
        key(job(compile={"enable": True}), 8),
        key(job(), 64),
    ):
        assert same == base
    by_op = {"mode": "selective", "op_keep": ["aten.mm"]}
    by_block = {
        "mode": "selective",
        "op_keep": [],
        "op_keep_by_block": ["0: aten.mm@0", "1-3: all"],
    }
    of_lists = key(job(activation_checkpoint=by_op), 8)
    assert of_lists == key(job(activation_checkpoint=by_block), 8)
    assert of_lists not in {base, key(job(activation_checkpoint={"mode": "full"}), 8)}
    others = {
        key(job(parallelism={"tensor_parallel_degree": 2}), 8),
        key(job(activation_checkpoint={"mode": "full"}), 8),
        key(job(parallelism={"data_parallel_replicate_degree": 2}), 8),
        key(job(optimizer={"name": "Muon"}), 8),
        key(job(), 1),
        key(job(model=MOE), 8),
    }
    assert len(others | {base}) == 7


@tabled("model, parallelism")
def test_tiny_jobs_are_valid_and_small(
    model: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    config = JobConfig.model_validate({"model": model, "parallelism": parallelism})
    small, layout = tiny(config, resolve_layout(config, 64))
    assert resolve_layout(small, layout.world_size) == layout
    assert small.model.sizes.num_params < 2e6


def test_tiny_jobs_of_pictures_have_few_tokens() -> None:
    config = load_from_argv([str(ROOT / "train_configs/flux_12b.toml")])
    small, _ = tiny(config, resolve_layout(config, 8))
    assert (small.training.seq_len, small.task.options["size"]) == (20, 8)


def paces_of(config: JobConfig, world: int) -> dict[str, float]:
    """Return the pace that a job's trace gets."""
    found: list[Any] = []
    get_traces(
        [TraceRequest(config, resolve_layout(config, world))], done=lambda _, t: found.append(t)
    )
    [[trace]] = [[*traces.values()] for traces in found]
    return trace.host


def test_a_trace_has_its_jobs_pace_also_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(training={"global_batch_size": 24})
    pace = paces_of(config, 2)
    assert pace["accumulation"] == 3
    # FSDP's hooks are a part of a block's calls.
    assert pace["forward block"] > pace["forward hooks"] > 0
    # Another batch needs another trace, and no other pace.
    recorded: list[bool] = []

    def watched(jobs: list[Job], *args: Any, **options: Any) -> Any:
        recorded.extend(job.of_host for job in jobs)
        return trace_jobs(jobs, *args, **options)

    monkeypatch.setattr(trace_cache, "trace_jobs", watched)
    again = paces_of(job(batch=2, training={"global_batch_size": 4}), 2)
    assert again == {**pace, "accumulation": 1}
    assert paces_of(config, 2) == pace
    assert {*recorded} == {False}


def test_a_job_that_cpus_cannot_run_has_the_usual_pace() -> None:
    [(_, traces)] = trace_jobs([Job((job(loss={"name": "none"}),), 2, (0,), of_host=True)], 1)
    assert not isinstance(traces, Exception)
    [trace] = traces
    assert trace.host == {} and not trace.step


# ---- the replay ------------------------------------------------------------------------------------

PACE = {"forward": 1.0, "forward block": 30.0, "forward hooks": 12.0}


class Paced(FixedCost):
    """As FixedCost, with tiny operations of 1 us, launches of 2, compiled ones of 3, and calls of compiled code of 50."""

    tiny_s = 1e-6
    launch_transfer_s = 4e-6
    compiled_call_s = 50e-6

    def launch_s(self, kernel: Any) -> float:
        return 3e-6 if kernel.host == "compiled" else 2e-6


def host_us(events: list[Event], host: dict[str, float] = PACE) -> float:
    """Return the microseconds that the host takes for a step."""
    trace = Trace(0, 4, {"dp": DP, "tp": TP}, step=events, host=host)
    rank = replay({0: trace}, Paced(), steps=1).ranks[0]
    return (rank.host[-1][1] - rank.host[0][0]) * 1e6


def layer(
    number: int, *, matmuls: int = 3, host: Any = "eager", action: str = ""
) -> list[Event]:
    """Return a block: FSDP's gather, then kernels, of which one is a transfer of TP."""
    scope = Scope("forward", f"layers.{number}.attention", action)
    work = replace(kernel(1), kind="matmul", host=host)
    return [
        Transfer("all_gather", "dp", 1, "bfloat16", 0, True, 10 * number, scope),
        *(Launch(work, 0, scope) for _ in range(matmuls)),
        Transfer("all_reduce", "tp", 1, "bfloat16", 0, True, 10 * number + 1, scope),
    ]


def test_the_host_issues_a_block_in_the_time_of_its_call() -> None:
    launches = 3 * 2 + 2 * 4
    one = host_us(layer(0))
    assert one == pytest.approx(30 + launches)
    # The time is a call's, however many kernels there are, and every layer adds as much.
    assert host_us(layer(0, matmuls=13)) == pytest.approx(30 + launches + 10 * 2)
    assert host_us([*layer(0), *layer(1), *layer(2)]) == pytest.approx(3 * one)
    # Micro-batches: as actions of a pipeline, or one after the other.
    assert host_us([*layer(0, action="0F0"), *layer(0, action="0F1")]) == pytest.approx(2 * one)
    again = host_us([*layer(0), *layer(0)], {**PACE, "accumulation": 2})
    assert again == pytest.approx(2 * one)


def test_compiled_blocks_take_their_hooks_a_call_and_their_launches() -> None:
    compiled = host_us([*layer(0, host="compiled"), *layer(1, host="compiled")])
    assert compiled == pytest.approx(2 * (12 + 4 + 50 + 3 * 3 + 4))


def test_operations_over_lists_count_each_tensor() -> None:
    update = replace(kernel(1), kind="optimizer", shapes=((1, 30), (40, 40)))
    assert host_us(
        [Launch(update, 0, Scope("optimizer"))], {"optimizer": 5.0}
    ) == pytest.approx(202)


def test_without_a_pace_the_usual_one_counts() -> None:
    assert host_us([Launch(kernel(1), 0, Scope("backward"))], {}) == pytest.approx(47)


def test_slower_hosts_show_as_waiting() -> None:
    """On Grace's cores the same step waits for its host, and on a DGX's it does not."""
    events = [e for n in range(40) for e in layer(n)]
    trace = Trace(0, 4, {"dp": DP, "tp": TP}, step=events, host={"forward block": 280.0})
    waits = {}
    for name in ("h100-sxm", "gb200"):
        profile = load_profile(name)
        cost = FixedCost(profile)
        cost.kernel_s = lambda kernel: 150e-6
        real = Cost(profile)
        cost.launch_s = real.launch_s
        cost.__class__ = type("C", (FixedCost,), {"tiny_s": real.tiny_s})
        waits[name] = replay({0: trace}, cost).ranks[0].host_s
    assert waits["h100-sxm"] < 0.1e-3 < 5e-3 < waits["gb200"]
