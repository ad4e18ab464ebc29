"""examples/own_hook.py adds a column, and entry points add hooks in a stated place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, job
from titan.config.plug_ins import plug_ins
from titan.run.hook import Hook
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer


def test_the_example_adds_a_column(tmp_path: Path) -> None:
    command = [sys.executable, "examples/own_hook.py", "train_configs/debug_model.toml"]
    command += ["--training.dataset=synthetic", "--training.steps=2", "--training.seq_len=32"]
    command += ["--training.local_batch_size=2", "--training.global_batch_size=4"]
    result = subprocess.run(
        [*command, f"--job.dump_folder={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["loss_spread"] > 0 for row in rows)


class Count(Hook):
    """Count steps, and check that flags come back."""

    state_key = "count"

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.calls = trainer, {}

    def step_begin(self) -> None:
        self.calls["begun"] = self.calls.get("begun", 0) + 1

    def flags(self) -> tuple[float, float]:
        return 1.0, float(self.trainer.step)

    def result(self, result: Any) -> None:
        assert list(result.flags[self]) == [1.0, result.step]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.calls)

    def load_state_dict(self, state: Any) -> None:
        self.calls = dict(state)


def test_a_hook_of_a_package_runs_before_the_row_is_written_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        name = "count"
        load = staticmethod(lambda: Count)

    monkeypatch.setattr(
        "titan.run.standard_hooks.plug_ins", lambda group: [*plug_ins(group), Entry]
    )
    for steps in (2, 5):
        trainer = Trainer(job(tmp_path, training={"steps": steps}), hooks=standard_hooks)
        try:
            assert isinstance(trainer.hooks[-3], Count)
            assert trainer.run() == 0
        finally:
            trainer.close()
    assert trainer.hooks[-3].calls == {"begun": 5}
    state = json.loads((tmp_path / "checkpoint" / "step-5" / "titan.json").read_text())
    assert state["count"] == {"begun": 5}


def test_a_trainer_without_hooks_trains(tmp_path: Path) -> None:
    trainer = Trainer(job(tmp_path))
    try:
        assert trainer.run() == 0 and trainer.step == 2
    finally:
        trainer.close()
    assert not (tmp_path / "checkpoint").exists()
