"""Extending a trace by equal blocks gives the trace of the deep model, to the last event; and where it cannot, it says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from tests.support.jobs import ROOT
from tests.support.traces import in_turn
from titan.checks.layout_rules import resolve_layout
from titan.config.load import load_from_argv
from titan.config.schema import JobConfig
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.repeat import CannotRepeat, Depth
from titan.sim.record.trace import Trace
from titan.sim.record.trace_cache import (
    TraceRequest,
    _Plan,
    distinct_ranks,
    get_traces,
    shallow,
)
from titan.sim.record.trace_jobs import Job, trace_jobs
from titan.sim.replay.memory import memory_report
from titan.sim.replay.queues import replay

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2, selective AC": (8, {}),
    "HSDP, full AC": (
        8,
        {
            "parallelism": {"data_parallel_replicate_degree": 2},
            "activation_checkpoint": {"mode": "full"},
        },
    ),
    "FSDP2, units of three and seven blocks kept": (
        4,
        {
            "model": {"flavor": "tiny", "overrides": {"n_layers": 62}},
            "parallelism": {
                "fsdp_blocks_per_unit": 3,
                "fsdp_kept_blocks": 7,
                "fsdp_prefetch": 2,
            },
        },
    ),
    "FSDP2, all blocks kept in units of two": (
        4,
        {
            "model": {"flavor": "tiny", "overrides": {"n_layers": 27}},
            "parallelism": {"fsdp_blocks_per_unit": 2, "fsdp_kept_blocks": 27}
            | {"fsdp_reshard_after_forward": "always"},
        },
    ),
    "DDP, plain loss": (
        4,
        {
            "parallelism": {
                "data_parallel_replicate_degree": 4,
                "data_parallel_shard_degree": 1,
            },
            "activation_checkpoint": {"mode": "none"},
            "loss": {"chunk_output": False, "chunk_tokens": 0},
        },
    ),
    "TP, Qwen3": (
        4,
        {
            "model": {"name": "qwen3", "flavor": "tiny", "overrides": {"n_layers": 15}},
            "parallelism": {"tensor_parallel_degree": 2},
        },
    ),
    "1F1B, multi-token prediction": (
        4,
        {
            "model": {"flavor": "tiny", "overrides": {"n_layers": 26, "num_mtp_modules": 2}},
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "1F1B",
            },
        },
    ),
    "1F1B, async TP, compiled": (
        8,
        {
            "model": {"flavor": "tiny", "overrides": {"n_layers": 24}},
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "1F1B",
                "tensor_parallel_degree": 2,
                "enable_async_tensor_parallel": True,
            },
            "compile": {"enable": True, "components": ["model"]},
            "activation_checkpoint": {"mode": "full"},
        },
    ),
    "EP, dense blocks first": (
        4,
        {
            "model": {
                "name": "qwen3",
                "flavor": "tiny_moe",
                # Three: the second and the third are alike, and a deeper model has no more of them.
                "overrides": {"n_layers": 21, "n_dense_layers": 3, "load_balance_coeff": 1e-3},
            },
            "parallelism": {"expert_parallel_degree": 2},
            "training": {
                "seq_len": 64,
                "local_batch_size": 4,
                "mixed_precision_param": "bfloat16",
            },
            "simulator": {"expert_imbalance": 1.5},
        },
    ),
    "1F1B, EP, TP": (
        8,
        {
            "model": {
                "name": "qwen3",
                "flavor": "tiny_moe",
                "overrides": {"n_layers": 30},
            },
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "1F1B",
                "tensor_parallel_degree": 2,
                "expert_parallel_degree": 4,
            },
            "activation_checkpoint": {"mode": "full"},
        },
    ),
    "interleaved": (
        2,
        {
            "model": {"flavor": "tiny", "overrides": {"n_layers": 46}},
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
            },
            "activation_checkpoint": {"mode": "none"},
        },
    ),
}


def job(sections: dict[str, Any]) -> JobConfig:
    base: dict[str, Any] = {
        "model": {"flavor": "tiny", "overrides": {"n_layers": 15}},
        "training": {"dataset": "synthetic", "seq_len": 64, "local_batch_size": 4},
        "activation_checkpoint": {"mode": "selective"},
    }
    return JobConfig.model_validate(base | sections)


def recordings(request: TraceRequest, stages: list[Depth]) -> dict[int, tuple[Trace, Trace]]:
    """Of each pipeline rank: the extended trace, as all are made in one process (but for a pipeline of single ranks), which runs
    every compiled program once; and the whole one, from a process of its own that runs everything."""
    world, ranks = request.layout.world_size, distinct_ranks(request.config, request.layout)
    together = _Plan(request, None, lambda *_: None).jobs(1)
    alone = [Job((request.config,), world, (rank,)) for rank in ranks]
    extended, whole = {}, {}
    for jobs, actual, replays_programs in ((together, extended, True), (alone, whole, False)):
        for number, traces in trace_jobs(jobs, 2, replays_programs=replays_programs):
            assert isinstance(traces, list), traces
            actual |= zip(jobs[number].ranks, traces, strict=True)
    return {rank: (extended[rank], whole[rank]) for rank in ranks}


def canonical(trace: Trace, section: str, numbers: defaultdict[str, dict[int, int]]) -> Iterator[Any]:  # fmt: skip
    """Events with blocks, works and events numbered as they come, and groups told by their ranks."""
    for event in getattr(trace, section):
        values: list[Any] = [type(event).__name__]
        for f in fields(event):
            value = getattr(event, f.name)
            if f.name in ("block", "event", "work"):
                value = numbers[f.name].setdefault(value, len(numbers[f.name]))
            values.append(trace.groups[value].ranks if f.name == "group" else value)
        yield values


@pytest.mark.parametrize(
    "name",
    in_turn(
        JOBS,
        slow=[
            "HSDP, full AC",
            "DDP, plain loss",
            "TP, Qwen3",
            "1F1B, multi-token prediction",
            "1F1B, EP, TP",
            "interleaved",
        ],
    ),
)
def test_extended_is_whole(name: str) -> None:
    world, sections = JOBS[name]
    config = job(sections)
    request = TraceRequest(config, resolve_layout(config, world))
    stages = shallow(request)
    assert stages is not None
    whole, extended = {}, {}
    for rank, (actual, full) in recordings(request, stages).items():
        whole[rank], extended[rank] = full, actual
        numbers = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        for section in ("setup", "first_step", "step"):
            assert len(getattr(actual, section)) == len(getattr(full, section)) > 0
            expected = canonical(full, section, numbers[0])
            for a, b in zip(expected, canonical(actual, section, numbers[1]), strict=True):
                assert a == b
    profile = load_profile("h100-sxm")
    assert replay(extended, Cost(profile)).step_s == replay(whole, Cost(profile)).step_s
    for rank in whole:
        a, b = (memory_report(traces[rank], profile) for traces in (whole, extended))
        assert (b.peak_active_bytes, b.peak_reserved_bytes) == (
            a.peak_active_bytes,
            a.peak_reserved_bytes,
        )
        assert b.by_module == a.by_module


def test_blocks_that_are_not_alike_are_refused() -> None:
    """Every second block recomputed: neighbours differ."""
    config = job({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}})
    request = TraceRequest(config, resolve_layout(config, 2))
    plan = _Plan(request, None, lambda *_: None)
    plan.depths = [Depth(0, 15)]
    [together] = plan.jobs(1)
    [(_, result)] = trace_jobs([together], 1)
    assert isinstance(result, CannotRepeat)


def test_blocks_that_differ_at_a_distance_are_refused() -> None:
    """A block recomputed after six that are not: few blocks would look alike."""
    config = job({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "7"}})
    assert shallow(TraceRequest(config, resolve_layout(config, 2))) is None


def test_models_with_two_kinds_of_blocks_are_recorded_whole() -> None:
    config = load_from_argv([str(ROOT / "train_configs/flux_12b.toml")])
    assert shallow(TraceRequest(config, resolve_layout(config, 8))) is None


def test_depths_may_have_a_process_each() -> None:
    config = job({})
    request = TraceRequest(config, resolve_layout(config, 2))
    events = []
    for processes in (1, 2):
        results: list[Any] = []
        get_traces(
            [request],
            processes=processes,
            use_cache=False,
            done=lambda _, traces, results=results: results.append(traces),
        )
        numbers = defaultdict[str, dict[int, int]](dict)
        events.append(list(canonical(results[0][0], "step", numbers)))
    assert events[0] == events[1] != []
