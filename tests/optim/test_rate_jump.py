"""The line about a learning rate that jumps where a run continues: by hand, and only where the job has changed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import job
from tests.support.metrics import read_json_lines
from tests.support.tables import tabled
from tests.support.trainers import Trainer, run_to_end
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.optim.schedule import rate_jump

COSINE = {"warmup_steps": 20, "decay_type": "cosine"}


def starter(steps: int = 100, *, phase: Any = (), **changes: Any) -> JobConfig:
    """Return a job with the starter's schedule."""
    sections = {"training": {"steps": steps}, "optimizer": {"lr": 3e-3}, "lr_scheduler": COSINE}
    config = job(**{name: section | changes.pop(name, {}) for name, section in sections.items()}, **changes)  # fmt: skip
    return JobConfig.model_validate(config.model_dump() | {"phase": list(phase)})


def jump(before: JobConfig, now: JobConfig, step: int = 100) -> str:
    return rate_jump(to_toml(before), now, step=step, ranks=1)


def test_more_steps_stretch_the_schedule_and_both_rates_are_said() -> None:
    line = jump(starter(), starter(200))
    # Progress 79 of 80 decay steps; then 80 of 180.
    last, following = (3e-3 * (1 + math.cos(math.pi * p)) / 2 for p in (79 / 80, 80 / 180))
    assert line.startswith(
        f"learning rate {last:.2e} -> {following:.2e} from step 100 to 101, "
    )
    assert (
        "lr_scheduler.total_steps = 100 keeps the one before, which goes on at 0.00e+00" in line
    )
    assert "[[phase]] with from_step = 101 and lr_factor" in line
    assert "\n" not in line


def test_what_it_advises_works() -> None:
    floor: dict[str, Any] = {"lr_scheduler": {"min_lr_factor": 0.1}}
    line = jump(starter(**floor), starter(200, **floor))
    kept = float(re.findall(r"goes on at ([\d.e+-]+);", line)[0])
    assert kept == pytest.approx(3e-4)
    total: dict[str, Any] = {"lr_scheduler": {"min_lr_factor": 0.1, "total_steps": 100}}
    assert jump(starter(**floor), starter(200, **total)) == ""
    phase = [{"from_step": 101, "lr_factor": 0.3, "decay_type": "cosine"}]
    assert jump(starter(), starter(200, phase=phase)) == ""


# {"phase": [{"from_step": 51, "lr_factor": 2.5}]}: planned from the beginning
@tabled("changes")
def test_no_false_alarm(changes: dict[str, Any]) -> None:
    """The same job at any step, in a ramp too; and more steps before its schedule decays."""
    config = starter(**changes)
    assert [step for step in range(1, 100) if jump(config, config, step)] == []
    if "total_steps" in str(changes) or "decay_ratio" in str(changes):
        assert jump(config, starter(200, **changes)) == ""
    # A little more is no jump.
    assert jump(config, starter(**changes | {"optimizer": {"lr": 3.5e-3} | changes.get("optimizer", {})}), 50) == ""  # fmt: skip


def test_another_peak_is_said_without_advice() -> None:
    line = jump(starter(), starter(optimizer={"lr": 3e-2}), 30)
    assert re.fullmatch(r"learning rate 2\.\d\de-03 -> 2\.\d\de-02 from step 30 to 31", line)
    # Half the steps: the rates of step 40 follow at once, and then fall.
    assert jump(starter(200), starter(100), 40).endswith(
        "at step 71 it is 9.26e-04, not 2.46e-03"
    )
    # A config that nobody can read says nothing.
    assert rate_jump("", starter(), step=3, ranks=1) == ""
    assert rate_jump("[model]\nname = 3", starter(), step=3, ranks=1) == ""


def test_a_run_says_it_once_and_the_rates_are_those_of_its_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"lr_scheduler": {"warmup_steps": 1, "decay_type": "cosine"}}
    said = []
    for steps in (6, 6, 12):
        run_to_end(Trainer(job(tmp_path, training={"steps": steps}, **schedule)))
        said.append(re.findall(r"learning rate (\S+) -> (\S+) from", capsys.readouterr().out))
    assert said[:2] == [[], []] and len(said[2]) == 1
    rates = [row["lr"] for row in read_json_lines(tmp_path / "metrics.jsonl")]
    assert [f"{rate:.2e}" for rate in rates[5:7]] == list(said[2][0])
