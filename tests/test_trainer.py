"""The trainer on one process: resuming, stopping, refusing, and what it leaves in the run folder."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.runs import logged_rows
from tests.support.trainers import Trainer
from titan.base.signals import EXIT_DONE, StopRequest
from titan.checkpoint.manager import CheckpointError, list_steps
from titan.config.load import load_config
from titan.config.plug_ins import plug_ins
from titan.config.schema import JobConfig
from titan.data import DataError
from titan.ops.recovery import NonFiniteError
from titan.run import trainer as plain
from titan.run.hook import Hook
from titan.run.metrics import Metrics
from titan.run.standard_hooks import standard_hooks
from titan.tasks.next_token import NextToken

BASE = with_changes(
    SMALL,
    training={"steps": 8},
    lr_scheduler={"warmup_steps": 2, "total_steps": 8},
    checkpoint={"interval": 4},
)
job = partial(any_job, base=BASE)


def run(config: JobConfig, *, stop: StopRequest | None = None) -> int | None:
    trainer = Trainer(config, stop=stop)
    try:
        return trainer.run()
    finally:
        trainer.close()


@pytest.mark.parametrize("late", [0, 1])
def test_rows_have_the_mean_loss_of_the_steps_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Also where, as on a device, the host reads a step's loss one step late; and over a resume."""
    every, some = tmp_path / "every", tmp_path / "some"
    run(job(every))
    monkeypatch.setattr(
        Trainer, "max_pending", property(lambda _: late, lambda *_: None), False
    )
    run(job(some, training={"steps": 5}, metrics={"log_freq": 3}))
    run(job(some, metrics={"log_freq": 3}))
    losses = {row["step"]: row["loss"] for row in logged_rows(every)}
    assert [row["loss_mean"] for row in logged_rows(every)] == list(losses.values())
    expected = {1: [1], 3: [2, 3], 5: [4, 5], 6: [6], 8: [7, 8]}
    assert {row["step"]: (row["loss"], row["loss_mean"]) for row in logged_rows(some)} == {
        step: (losses[step], fmean(losses[s] for s in steps))
        for step, steps in expected.items()
    }


def test_a_resumed_run_tells_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job(tmp_path, training={"steps": 4}))
    capsys.readouterr()
    changes = {"training": {"local_batch_size": 4}, "optimizer": {"eps": 1e-6}}
    run(job(tmp_path, **changes, metrics={"log_freq": 2}))
    said = " ".join(capsys.readouterr().out.split())
    changed = "optimizer.eps: 1e-08 -> 1e-06; training.global_batch_size: 2 -> 4"
    assert f"changed since it was saved: {changed}" in said
    assert "768 tokens in all" in said  # 4 steps of 64 tokens, 4 of 128


def test_a_check_of_replicas_without_replicas_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job(tmp_path, fault_tolerance={"check_replicas_every_n_steps": 1}))
    assert capsys.readouterr().out.count("is replicated, so there is nothing to compare") == 1


def test_harmless_changes_are_no_news(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same samples in each step, shared out otherwise, and settings that change no result."""
    run(job(tmp_path, training={"steps": 4, "local_batch_size": 4}))
    changes = {
        "training": {"local_batch_size": 2, "global_batch_size": 4},
        "optimizer": {"implementation": "foreach"},
        "data": {"cache_folder": str(tmp_path / "cache")},
    }
    capsys.readouterr()
    run(job(tmp_path, **changes))
    said = capsys.readouterr().out
    assert "starting from" in said and "changed since" not in said


def test_data_and_tokenizer_are_opened_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr("titan.run.trainer.build_train_step", build)
    path = str(tmp_path / "none")
    mistakes: list[dict[str, Any]] = [
        {"tokenizer": {"path": path}},
        {"training": {"dataset": "text", "dataset_path": path}},
        {"validation": {"enable": True, "dataset": "text", "dataset_path": path}},
    ]
    for changes in mistakes:
        with pytest.raises(DataError):
            Trainer(job(tmp_path / "run", **changes))
        dist.destroy_process_group()


@pytest.mark.parametrize("setting", ["enable = false", "load_only = true"])
def test_a_stop_without_checkpoints_says_that_nothing_is_saved(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """75 would have it requeued, to be stopped again, for ever."""
    name, _, value = setting.partition(" = ")
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    code = run(job(tmp_path, checkpoint={name: value == "true"}), stop=stop)
    said = " ".join(capsys.readouterr().out.split())
    assert code == 2
    assert (
        f"stopped by SIGTERM after step 1. NOTHING WAS SAVED, because of checkpoint.{setting}"
        in said
    )
    assert "run the same command to go on" not in said
    assert "1 step lost" in said
    assert not (tmp_path / "checkpoint").exists()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 2)
    assert "NOTHING WAS SAVED" in status["reason"]


def test_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(
        "titan.run.progress.write_status", lambda *_, step, **kw: written.append(step)
    )
    monkeypatch.setattr("titan.run.metrics._STATUS_S", 1e9)
    run(job(tmp_path))
    assert len(logged_rows(tmp_path)) == 8
    assert written == [0, 1]  # and not with every row: a rename may wait for the disk
    assert load_config(tmp_path / "config.toml") == job(tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 8)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["world_size"] == 1
    assert (tmp_path / "logs" / "rank-0.log").exists()
    assert list_steps(tmp_path / "checkpoint") == [4, 8]


def test_a_finished_run_is_a_no_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(job(tmp_path))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoint").rglob("*")}
    assert run(job(tmp_path)) == EXIT_DONE
    assert "nothing to do: step 8 of 8 is done" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoint").rglob("*")} == before
    assert len(logged_rows(tmp_path)) == 8


def test_a_non_finite_loss_stops_with_step_rank_and_samples(tmp_path: Path) -> None:
    trainer = Trainer(job(tmp_path, training={"global_batch_size": 4}))
    trainer.train_one_step()
    with torch.no_grad():
        trainer.train_step.model_parts[0].get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(
        NonFiniteError,
        match=r"step 2: loss nan.*rank 0: samples 4 to 5; rank 0: samples 6 to 7",
    ):
        trainer.run()
    trainer.close()
    assert not list_steps(tmp_path / "checkpoint")


def test_first_step_checkpoint_and_load_only(tmp_path: Path) -> None:
    run(job(tmp_path, checkpoint={"enable_first_step_checkpoint": True}))
    assert list_steps(tmp_path / "checkpoint") == [1, 4, 8]
    run(job(tmp_path, checkpoint={"load_step": 4, "load_only": True}))
    assert list_steps(tmp_path / "checkpoint") == [1, 4, 8]
    assert [r["step"] for r in logged_rows(tmp_path)] == list(range(1, 9))


def test_a_missing_load_step_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    run(job(tmp_path))
    with pytest.raises(CheckpointError, match=r"no step 5 in .*; there is 4, 8"):
        Trainer(job(tmp_path, checkpoint={"load_step": 5}))
    torch.distributed.destroy_process_group()


def test_initial_load_takes_the_weights_only(tmp_path: Path) -> None:
    run(job(tmp_path / "first"))
    start = {"initial_load_path": str(tmp_path / "first" / "checkpoint" / "step-8")}
    trainer = Trainer(job(tmp_path / "second", checkpoint=start))
    assert trainer.step == 0 and not trainer.train_step.optimizer.state
    trainer.close()
    fresh = Trainer(job(tmp_path / "third", debug={"seed": 0}))
    pairs = zip(
        trainer.train_step.model_parts[0].parameters(),
        fresh.train_step.model_parts[0].parameters(),
        strict=True,
    )
    assert any(not torch.equal(a, b) for a, b in pairs)
    fresh.close()


def test_model_only_last_save_in_another_precision(tmp_path: Path) -> None:
    run(job(tmp_path, checkpoint={"last_save_model_only": True, "export_dtype": "bfloat16"}))
    from titan.checkpoint.manager import stored_shapes

    stored = stored_shapes(tmp_path / "checkpoint" / "step-8")
    assert stored and all(name.startswith("model.") for name in stored)
    assert {dtype for _, dtype in stored.values()} == {torch.bfloat16}


def test_validation_is_logged_with_bits_per_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = NextToken.report
    monkeypatch.setattr(
        NextToken, "report", lambda *a, **k: (time.sleep(0.5), report(*a, **k))[1]
    )
    files = tmp_path / "text"
    files.mkdir()
    for number in range(40):
        (files / f"{number}.txt").write_text(f"document {number} " * 30)
    config = job(
        tmp_path / "run",
        training={"dataset": "text", "dataset_path": str(files)},
        data={"cache_folder": str(tmp_path / "cache"), "validation_fraction": 0.3},
        validation={"enable": True, "freq": 4, "steps": 2, "local_batch_size": 2},
    )
    run(config)
    by_step = {r["step"]: r for r in logged_rows(tmp_path / "run")}
    assert (
        "validation_loss" not in by_step[3]
        and by_step[4]["validation_loss"] < by_step[1]["loss"]
    )
    # One byte a token but for the begin and end tokens: bits per byte a little above loss / ln 2.
    ratio = by_step[8]["bits_per_byte"] / (by_step[8]["validation_loss"] / 0.693147)
    assert 1.0 <= ratio < 1.05
    assert by_step[4]["validation_s"] > 0.5  # no time of training


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"258 tokens, but llama3 tiny has a vocabulary of 100"
    ):
        Trainer(job(tmp_path, model={"overrides": {"vocab_size": 100}}))
    torch.distributed.destroy_process_group()


class Count(Hook):
    """Count steps, and check that flags come back."""

    state_key = "count"

    def __init__(self, trainer: plain.Trainer) -> None:
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
        trainer = plain.Trainer(
            any_job(tmp_path, training={"steps": steps}), hooks=standard_hooks
        )
        try:
            kinds = [*map(type, trainer.hooks)]
            assert kinds.index(Count) < kinds.index(Metrics)
            assert trainer.run() == 0
        finally:
            trainer.close()
    [counted] = [hook for hook in trainer.hooks if isinstance(hook, Count)]
    assert counted.calls == {"begun": 5}
    state = json.loads((tmp_path / "checkpoint" / "step-5" / "titan.json").read_text())
    assert state["count"] == {"begun": 5}


def test_a_trainer_without_hooks_trains(tmp_path: Path) -> None:
    trainer = plain.Trainer(any_job(tmp_path))
    try:
        assert trainer.run() == 0 and trainer.step == 2
    finally:
        trainer.close()
    assert not (tmp_path / "checkpoint").exists()
