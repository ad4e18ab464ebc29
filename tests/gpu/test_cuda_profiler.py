"""A trace recorded on a GPU, and a memory snapshot."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.profiler_traces import adds_up, modules_ms, parts_s
from tests.support.trainers import Trainer, run_to_end
from titan.config.schema import JobConfig
from titan.tools.trace_files import read_trace


def test_trace_and_snapshot(tmp_path: Path) -> None:
    config = JobConfig.model_validate(
        {
            "job": {"dump_folder": str(tmp_path)},
            "model": {"flavor": "tiny"},
            "training": {"seq_len": 128, "steps": 4, "dataset": "synthetic"},
            "lr_scheduler": {"warmup_steps": 2},
            "checkpoint": {"enable": False},
            "profiling": {
                "enable_profiling": True,
                "enable_memory_snapshot": True,
                "profile_freq": 4,
            },
        }
    )
    trainer = Trainer(config)
    run_to_end(trainer)
    timeline = read_trace(tmp_path / "traces/step-4/rank-0.json.gz")
    assert adds_up(timeline)
    for part in ("matmul", "attention", "elementwise", "optimizer"):
        assert parts_s(timeline)[part] > 0, part
    modules = modules_ms(timeline)
    for i in range(8):
        row = modules[f"layers.{i}.attention"]
        assert row["forward"] > 0 and row["backward"] > 0
    assert (tmp_path / "memory_snapshot/step-4/rank-0.pickle").stat().st_size > 10_000
