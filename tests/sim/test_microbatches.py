"""Microbatches that repeat others record what they would have recorded themselves, to the last event; and few of them run."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sim.test_extrapolate import canonical
from tests.support.traces import in_turn, job
from titan.checks.rules import check_to_run
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.sim.record.trace import Trace
from titan.sim.record.trace_jobs import Job, trace_jobs

FULL = {"mode": "full"}
MANY = {"training": {"seq_len": 16, "local_batch_size": 6}}
JOBS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1F1B, accumulation": (
        "1F1B",
        4,
        {"training": {"seq_len": 16, "local_batch_size": 6, "global_batch_size": 24}},
    ),
    "GPipe, DDP": (
        "GPipe",
        4,
        {
            "parallelism": {
                "data_parallel_replicate_degree": 2,
                "data_parallel_shard_degree": 1,
                "fsdp_reshard_after_forward": "always",
            }
        },
    ),
    "1F1B, resharded": ("1F1B", 4, {"parallelism": {"fsdp_reshard_after_forward": "always"}}),
    "Interleaved1F1B, TP": (
        "Interleaved1F1B",
        4,
        {"parallelism": {"tensor_parallel_degree": 2}, "activation_checkpoint": FULL},
    ),
    "LoopedBFS, whole logits": ("LoopedBFS", 4, {"loss": {"chunk_output": False}}),
    "1F1B, compiled": (
        "1F1B",
        4,
        {"compile": {"enable": True, "components": ["model"]}, "activation_checkpoint": FULL},
    ),
    "Interleaved1F1B, EP": (
        "Interleaved1F1B",
        4,
        {
            "model": {"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 4}},
            "parallelism": {"expert_parallel_degree": 2},
            "activation_checkpoint": FULL,
        },
    ),
}


def _job(name: str) -> tuple[JobConfig, int]:
    schedule, world, own = JOBS[name]
    sections: dict[str, Any] = MANY | own
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    sections["parallelism"] = parallelism | sections.get("parallelism", {})
    config = job(layers=4, **sections)
    check_to_run(config, world_size=world)
    return config, world


def _count_forwards(file: Path, config: JobConfig, layout: Layout) -> None:
    """Write a line for each microbatch that repeats another one."""
    from titan.sim.record.microbatches import Microbatches

    repeat = Microbatches.repeat

    def counting(self: Any, stage: int, number: int, part: str) -> Any:
        with file.open("a") as stream:
            stream.write(f"{part}{number}\n")
        return repeat(self, stage, number, part)

    Microbatches.repeat = counting


@pytest.mark.parametrize("name", in_turn(JOBS, slow=[*JOBS][1:]))
def test_repeated_is_run(name: str, tmp_path: Path) -> None:
    config, world = _job(name)
    ranks = (0, world // 2)
    file = tmp_path / "repeated"
    prepare = partial(_count_forwards, file)
    jobs = [Job((config,), world, (rank,), prepare=prepare) for rank in ranks]
    repeated: dict[int, Any] = dict(trace_jobs(jobs, 2))
    counts = Counter(file.read_text().split()) if file.exists() else Counter()
    run: dict[int, Any] = dict(trace_jobs(jobs, 2, replays_programs=False))
    # Gathering again, each microbatch awaits what the one before it has begun: then none repeats another.
    assert counts["F3"] == counts["B3"]
    assert (counts["F3"] > 0) is (name != "1F1B, resharded")
    assert counts["F0"] == counts["B0"] == counts["F5"] == counts["B5"] == 0
    for number in range(len(ranks)):
        (actual,), (expected,) = repeated[number], run[number]
        assert isinstance(actual, Trace)
        assert isinstance(expected, Trace)
        numbers = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        for section in ("setup", "first_step", "step"):
            assert len(getattr(actual, section)) == len(getattr(expected, section))
            events = canonical(expected, section, numbers[0])
            for a, b in zip(events, canonical(actual, section, numbers[1]), strict=True):
                assert a == b
