"""titan/train.py: what is known before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan.config.sections import JobConfig
from titan.observe.runinfo import write_status
from titan.signals import EXIT_FAILED, EXIT_STOPPED, for_agent
from titan.train import is_finished


def job(folder: Path, *, steps: int = 5, **checkpoint: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": {"dump_folder": str(folder)},
            "training": {"steps": steps},
            "checkpoint": checkpoint,
        }
    )


def test_a_run_is_finished_with_its_last_step_and_checkpoint(tmp_path: Path) -> None:
    assert not is_finished(job(tmp_path))
    write_status(tmp_path, state="done", exit_code=0, step=5)
    assert not is_finished(job(tmp_path))  # its checkpoints were deleted: begin again
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    assert is_finished(job(tmp_path)) and is_finished(job(tmp_path, steps=3))
    assert not is_finished(job(tmp_path, steps=6))
    assert not is_finished(job(tmp_path, load_step=2))
    assert not is_finished(job(tmp_path, enable=False))
    write_status(tmp_path, state="failed", exit_code=1, step=5)
    assert not is_finished(job(tmp_path))


def test_torchrun_is_told_0_where_it_would_start_a_stopped_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert for_agent(EXIT_STOPPED) == EXIT_STOPPED
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert for_agent(EXIT_STOPPED) == EXIT_STOPPED
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert for_agent(EXIT_STOPPED) == for_agent(EXIT_FAILED) == 0
