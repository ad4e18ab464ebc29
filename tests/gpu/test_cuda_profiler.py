"""A trace recorded on a GPU, and a memory snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import NEEDS_GPU as pytestmark  # noqa: F401
from tests.support.trainers import Trainer, run_to_end
from titan.config.schema import JobConfig
from titan.tools.trace_files import read_report


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
    report = read_report(tmp_path / "traces/step-4/rank-0.json.gz")
    assert report.device == "gpu"
    assert sum(report.parts_s.values()) == pytest.approx(report.step_s)
    assert sum(row["total"] for row in report.modules_s.values()) == pytest.approx(
        report.step_s
    )
    for part in ("matmul", "attention", "elementwise", "optimizer"):
        assert report.parts_s[part] > 0, part
    for i in range(8):
        row = report.modules_s[f"layers.{i}.attention"]
        assert row["forward"] > 0 and row["backward"] > 0
    assert (tmp_path / "memory_snapshot/step-4/rank-0.pickle").stat().st_size > 10_000
