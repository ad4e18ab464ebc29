"""Variants of one world share a recording process: each is recorded as it would be alone, event by event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.sim.test_extrapolate import canonical, job
from titan.sim.record.repeat import CannotRepeat
from titan.sim.record.trace import Trace
from titan.sim.record.trace_jobs import Job, _groups, trace_jobs


def refuse(traces: Sequence[Trace]) -> Trace:
    raise CannotRepeat("it stands for a job whose blocks are not alike")


def variants(parallelism: dict[str, Any], **model: Any) -> list[Job]:
    """What a sweep over recomputation, batch, sequence, FSDP and optimizers records in a world of 4 ranks."""
    sections: list[dict[str, Any]] = [
        {"activation_checkpoint": {"mode": "none"}},
        {"activation_checkpoint": {"mode": "full"}, "training": {"seq_len": 128}},
        {"training": {"local_batch_size": 2, "seq_len": 64}},
        {"parallelism": {"fsdp_reshard_after_forward": "never"}},
        {"optimizer": {"name": "AdamW", "early_step_in_backward": True}},
        {
            "quantize": {"linear": {"float8": {"emulate": True}}},
            "model": {"converters": ["float8"]},
        },
        {"activation_checkpoint": {"mode": "none"}},  # again, after all of the others
    ]
    base: dict[str, Any] = {"model": {"flavor": "tiny", "overrides": {"n_layers": 3}}}
    base["simulator"] = {"expert_imbalance": 1.2}  # another one runs in a separate process
    configs = []
    for own in sections:
        merged = base | own
        merged["model"] = base["model"] | own.get("model", {}) | model
        merged["parallelism"] = parallelism | own.get("parallelism", {})
        configs.append(job(merged))
    return [Job((config,), 4, (0,)) for config in configs]


def check(jobs: list[Job]) -> None:
    # The fifth cannot be extended: the rest goes on in another process.
    jobs.insert(4, Job(jobs[0].programs, 4, (0,), join=refuse))
    assert [len(numbers) for numbers in _groups(jobs, 1)] == [len(jobs)]
    shared: dict[int, Any] = dict(trace_jobs(jobs, 1, shared=True))
    alone: dict[int, Any] = dict(trace_jobs(jobs, 2))
    assert [*shared] == [*range(len(jobs))] == sorted(alone)
    assert isinstance(shared.pop(4), CannotRepeat)
    for number, traces in shared.items():
        assert isinstance(traces, list), traces
        numbers = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        for section in ("setup", "first_step", "step"):
            expected = [*canonical(alone[number][0], section, numbers[0])]
            assert [*canonical(traces[0], section, numbers[1])] == expected != []


def test_variants_of_one_world_are_recorded_as_alone() -> None:
    check(variants({"tensor_parallel_degree": 2}))


def test_so_are_experts() -> None:
    check(variants({"expert_parallel_degree": 2}, name="qwen3", flavor="tiny_moe")[:5])


def test_worlds_are_kept_apart() -> None:
    """Compiled jobs, pipelines, and jobs of other layouts or assumptions have other processes."""
    one, *_ = variants({})
    tp, *_ = variants({"tensor_parallel_degree": 2})
    uneven = Job((job({"simulator": {"expert_imbalance": 2.0}}),), 4, (0,))
    compiled = Job((job({"compile": {"enable": True}}),), 4, (0,))
    pipeline = Job((job({"parallelism": {"pipeline_parallel_degree": 2}}),), 4, (0,))
    jobs = [one, tp, uneven, compiled, pipeline]
    assert [*_groups([*jobs, *jobs[:2], *variants({})[:1]], 1)] == [
        [0, 5, 7],
        [1, 6],
        [2],
        [3],
        [4],
    ]
    # No process is idle for the sake of another one that is warm.
    assert sorted(map(len, _groups([one] * 6, 4))) == [2, 2, 2]
    assert [*map(len, _groups([one, one], 2))] == [1, 1]
