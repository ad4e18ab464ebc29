"""titan/numerics/diff/audit.py: a step computed again, against runs with one fault each, which strikes once."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import finished
from tests.support.jobs import ROOT, job
from tests.support.runs import logged_rows, saved_tensors
from titan.base.untrusted import InputError
from titan.config.load import load_from_argv
from titan.numerics.diff.audit import Audit, audit
from titan.numerics.diff.saved import compare_steps
from titan.numerics.experiment import Side, recomputation
from titan.run.hook import Hook
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer

STEP, WEIGHT = 6, "layers.1.feed_forward.w1.weight"
Fault = Callable[[Trainer], Hook]


def _train(config: Any, *faults: Fault) -> None:
    """Train in this process."""
    trainer = Trainer(config, hooks=lambda t: [*(f(t) for f in faults), *standard_hooks(t)])
    trainer.run()
    trainer.close()


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each recomputation would take seconds."""

    def train(words: Sequence[str], *, ranks: int, what: str, python: str) -> None:
        assert ranks == 1
        _train(load_from_argv(words, warn=False))

    monkeypatch.setattr("titan.numerics.experiment.train", train)


def _run(folder: Path, *faults: Fault, **sections: Any) -> Path:
    sections = {"training": {"steps": 8}, "checkpoint": {"interval": 3}} | sections
    _train(job(folder, **sections), *faults)
    return folder


class _Fault(Hook):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.weight = dict(trainer.train_step.model_parts[0].named_parameters())[WEIGHT]


def _flip(x: torch.Tensor, *, at: tuple[int, int], bit: int) -> None:
    with torch.no_grad():
        x[at] = x[at].view(torch.int32).bitwise_xor(1 << bit).view(torch.float32)


class WeightFlips(_Fault):
    """A bit of the weight flips between the update of the step and its save."""

    bit = 0

    def step_end(self) -> None:
        if self.trainer.step == STEP:
            _flip(self.weight, at=(5, 7), bit=self.bit)


class GradientFlips(_Fault):
    """A bit of a gradient flips after it was clipped, so that no row of metrics shows the step."""

    step = STEP

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        trainer.train_step.optimizer.register_step_pre_hook(self.strike)

    def strike(self, *_: Any) -> None:
        if self.trainer.step == self.step:
            assert self.weight.grad is not None
            _flip(self.weight.grad, at=(5, 7), bit=22)


class EarlierGradientFlips(GradientFlips):
    step = STEP - 1


class SampleReturns(_Fault):
    """A step trains on a sample of the step before once more."""

    def before_forward(self, batches: Sequence[Any]) -> None:
        if self.trainer.step == STEP - 1:
            for new, old in zip(vars(batches[0]).values(), self.seen, strict=True):
                if isinstance(new, torch.Tensor):
                    new[0] = old[0]
        self.seen = [
            x.clone() if isinstance(x, torch.Tensor) else x for x in vars(batches[0]).values()
        ]


def test_what_is_right_has_equal_bits(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = audit(run, STEP)
    assert found.equal_bits and found.is_same and not found.findings
    assert (found.since, found.rows) == (3, 3) and found.tensors > 60
    assert audit(run, 2).since == 0 and audit(run, 2).rows == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    # Another seed of the disturbance does not exceed the limits that one measures, in tensors that the one left alone either.
    keys = "--debug.record_steps=[4,5,6]"
    for seed in (7, 8, 9):
        moved = audit(run, STEP, keys=[keys, f"--debug.record_perturbed={seed}"])
        assert not moved.equal_bits and not moved.findings
        assert 0 < moved.limits["weights"] < 1e-4


@pytest.mark.parametrize("bit", [0, 12, 30])
def test_a_flipped_bit_of_a_weight_is_named(tmp_path: Path, bit: int) -> None:
    run = _run(tmp_path / "run", type("Flip", (WeightFlips,), {"bit": bit}))
    found = audit(run, STEP)
    saved = saved_tensors(run / "checkpoint" / f"step-{STEP}")[f"model.{WEIGHT}"][5, 7].item()
    (bits,) = struct.unpack("<I", struct.pack("<f", saved))
    (right,) = struct.unpack("<f", struct.pack("<I", bits ^ 1 << bit))
    (text,) = found.findings
    assert (
        f"model.{WEIGHT}[5, 7] is {saved:.9g}, and {right:.9g} when" in text
        and "(one bit)" in text
    )
    assert found.guilty.startswith("the weights of the checkpoint")
    # The run goes on from the wrong weight, so a later step is right by its own checkpoint.
    assert audit(run, 8).equal_bits


def test_a_flipped_bit_of_a_gradient_is_named(tmp_path: Path) -> None:
    found = audit(_run(tmp_path / "last", GradientFlips), STEP)
    assert all(f"{WEIGHT}" in text and "[5, 7]" in text for text in found.findings)
    assert any(f"optimizer.{WEIGHT}.exp_avg[5, 7]" in text for text in found.findings)
    assert found.guilty == f"the update of step {STEP}"
    found = audit(_run(tmp_path / "earlier", EarlierGradientFlips), STEP)
    # The loss that follows is too coarse to show it, and all gradients do.
    # How many of them lie beyond rounding depends on the processor.
    assert len(found.findings) > 1 and f"{WEIGHT}.exp_avg" in found.findings[0]
    assert found.guilty.startswith(f"an update of steps 4 to {STEP}")


def test_a_sample_out_of_order_is_named(tmp_path: Path) -> None:
    found = audit(_run(tmp_path / "run", SampleReturns), STEP)
    assert found.findings[0].startswith(f"step {STEP - 1}: loss is")
    assert found.guilty == f"the samples of step {STEP - 1}, or its forward pass"
    # Recorded steps tell the two apart.
    debug = {"record_steps": [STEP - 1]}
    found = audit(_run(tmp_path / "recorded", SampleReturns, debug=debug), STEP)
    assert found.guilty == f"the samples of step {STEP - 1}"


def test_a_file_that_changed_on_disk_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    file = next((run / "checkpoint" / f"step-{STEP}").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    saved = saved_tensors(file.parent)[f"model.{WEIGHT}"]
    content[content.index(saved.numpy().tobytes()) + 4 * 9] ^= 4
    file.write_bytes(content)
    found = audit(run, STEP)
    assert found.guilty.startswith("the files of the checkpoint")
    assert any(f"model.{WEIGHT}[0, 9] is" in text for text in found.findings)
    # A damaged checkpoint is no place to begin.
    assert audit(run, 8).since == 3


def test_the_schedule_and_the_phases_of_the_run_are_kept(tmp_path: Path) -> None:
    phases = [{"from_step": 3, "seq_len": 16}, {"from_step": 7, "lr_factor": 0.5}]
    base = job(tmp_path / "run").model_dump(exclude_unset=True)
    base["training"]["steps"], base["checkpoint"] = (
        8,
        {"interval": 5, "last_save_model_only": True},
    )
    _train(type(job()).model_validate(base | {"phase": phases}))
    assert audit(tmp_path / "run", 6).equal_bits
    found = audit(tmp_path / "run", 8)
    assert found.equal_bits and not found.findings and (found.since, found.rows) == (6, 2)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        audit(tmp_path, 1)
    run = _run(tmp_path / "run")
    with pytest.raises(InputError, match="neither a row of metrics nor a checkpoint of step 9"):
        audit(run, 9)


def test_another_layout_is_equal_but_for_rounding(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    wrong = _run(tmp_path / "flip", type("Flip", (WeightFlips,), {"bit": 20}))
    for folder, code in ((run, 0), (wrong, 1)):
        found = _audit_elsewhere(
            folder, tmp_path, code, "--parallelism.tensor_parallel_degree=2"
        )
        assert not found.equal_bits and not found.is_same and found.rows == 3
    (text,) = found.findings
    assert f"model.{WEIGHT}[5, 7] is" in text and found.guilty.startswith("the weights")


def test_a_step_before_a_start_in_another_layout_is_equal_but_for_rounding(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path / "run", training={"steps": STEP}, lr_scheduler={"total_steps": 8})
    micro = {"steps": 8, "local_batch_size": 1, "global_batch_size": 2}
    _run(run, training=micro, lr_scheduler={"total_steps": 8})
    found = audit(run, STEP)
    assert not found.equal_bits and not found.is_same and not found.findings
    assert audit(run, 8).is_same


def test_experts_on_other_ranks_are_equal_but_for_rounding(tmp_path: Path) -> None:
    model = {"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 2}}
    run = _run(tmp_path / "run", model=model, training={"steps": 8, "global_batch_size": 4})
    found = _audit_elsewhere(run, tmp_path, 0, "--parallelism.expert_parallel_degree=2")
    assert not found.equal_bits and found.tensors > 60


def _audit_elsewhere(run: Path, folder: Path, code: int, *keys: str) -> Audit:
    """Audit in processes of its own, with another layout."""
    words = [
        *f"audit {run} --step {STEP}".split(),
        *keys,
        *f"--json {folder}/found.json".split(),
    ]
    command = [sys.executable, "-m", "titan.cli", *words]
    result = finished(command, cwd=ROOT, code=None)
    assert result.returncode == code, result.stdout + result.stderr
    return Audit(**json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize(
    ("column", "value", "guilty"),
    [
        ("grad_norm", float("nan"), "the gradients of step 5"),
        ("lr", 1.0, "the learning rate of step 5"),
        ("loss_mean", 7.0, "the loss_mean of step 5"),
        ("num_skipped", 1, "the num_skipped of step 5"),
        ("loss", None, ""),
    ],
)
def test_the_first_column_that_differs_is_named_or_its_row_if_all_that_follows_is_equal(
    column: str, value: float | None, guilty: str, tmp_path: Path
) -> None:
    run = _run(tmp_path / "run")
    rows = logged_rows(run)
    rows[4] |= {"step_s": 9.0, column: value}  # times may be any
    _write_rows(run, rows)
    for step, wrong in ((5, guilty), (STEP, "the row of step 5 in metrics.jsonl")):
        found = audit(run, step)
        (text,) = found.findings
        assert text.startswith(f"step 5: {column} is {value!r}, and ")
        assert found.guilty.startswith(wrong)


def _write_rows(run: Path, rows: list[Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_base_that_is_off_is_a_possible_cause_and_rows_are_those_of_the_steps(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path / "run", metrics={"log_freq": 2})
    rows = logged_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 8]
    # The mean of a row covers steps that have none.
    found = audit(run, 8)
    assert found.equal_bits and found.since == STEP and not found.findings
    _write_rows(run, [*rows[:3], rows[3], rows[3], rows[4]])
    assert audit(run, STEP).findings[0] == "step 6: metrics.jsonl has several rows of it"
    _write_rows(run, rows[:2] + rows[3:])
    assert audit(run, STEP).findings[0] == "step 4: metrics.jsonl has no row of it"
    _write_rows(run, rows)
    other = _run(tmp_path / "other", optimizer={"lr": 0.1})
    shutil.rmtree(run / "checkpoint/step-3")
    shutil.copytree(other / "checkpoint/step-3", run / "checkpoint/step-3")
    assert "or the checkpoint of step 3" in audit(run, STEP).guilty


@pytest.mark.parametrize("text", ['"position": 12', '"tokens": 384'])
def test_what_a_checkpoint_says_beside_its_tensors_is_compared(
    text: str, tmp_path: Path
) -> None:
    one, two = (_run(tmp_path / name) / "checkpoint" / f"step-{STEP}" for name in "ab")
    assert compare_steps(one, two, None, rounds=False).equal_bits
    file = one / "titan.json"
    file.write_text(file.read_text().replace(text, f"{text}0", 1))
    found = compare_steps(one, two, None, rounds=False)
    assert not found.equal_bits and text.split('"')[1] in found.other[0]


def test_each_phase_has_the_batch_of_the_run() -> None:
    """On any number of ranks: a phase with another local batch has its own number of sequences in a step."""
    phases = [{"from_step": 5, "local_batch_size": 8}, {"from_step": 7, "local_batch_size": 2}]
    config = job(training={"local_batch_size": 4, "steps": 8}, phase=phases)
    changes = recomputation(Side([], config, 2), base=None, step=6, record=[])
    assert changes["training.global_batch_size"] == 8
    assert changes["phase"] == [{**phases[0], "global_batch_size": 16}]
