"""Runs of three phases: stopped in each they go on to the same bits, and other layouts compute the same numbers."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends import registry

from tests.support.jobs import ROOT, SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.layouts import BOUND, largest, whole_gradients
from tests.support.ranks import Pool
from tests.support.runs import errors, logged_rows, numbers, same_tensors
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checks.phase_rules import check_borders
from titan.checks.rules import check_to_run
from titan.config.load import load_config
from titan.config.phases import phases_of
from titan.config.schema import JobConfig
from titan.contrib.chat.tests.test_chat import LLAMA, WORDS, conversations, written
from titan.data.tokenizer import EOS
from titan.observe.clock import StepTimer

STEPS = 10
# A larger batch, then longer sequences of another blend, in which the rate falls to a tenth.
PHASES = [
    {"from_step": 4, "global_batch_size": 8},
    {
        "from_tokens": 3 * 4 * 32 + 3 * 8 * 32,  # step 7
        "seq_len": 64,
        "local_batch_size": 4,
        "weights": [1.0, 0.0],
        "min_lr_factor": 0.1,
    },
]
BASE = with_changes(
    SMALL,
    training={"steps": STEPS, "global_batch_size": 4, "dataset": "stdlib"},
    data={"sources": [{"type": "synthetic"}, {"type": "synthetic", "weight": 3.0}]},
    # An element whose gradient is next to nothing must not take its rounding error as a full step.
    optimizer={"lr": 1e-3, "eps": 1e-6},
    lr_scheduler={"warmup_steps": 2, "decay_ratio": 0.0},
    checkpoint={"interval": 2, "keep_latest_k": 0},
)


FLOPS = any_job(base=BASE).model.sizes.flops_per_token


job = partial(any_job, base=BASE, phase=PHASES)


def finish(
    config: JobConfig, kind: type[Trainer] = Trainer
) -> tuple[Trainer, dict[str, Tensor]]:
    """Run a job; return its trainer, and the gradients of the first step of each phase."""
    check_to_run(config, world_size=dist.get_world_size() if dist.is_initialized() else 1)
    trainer, gradients = kind(config), {}

    def keep(*_: Any) -> None:
        if (step := trainer.step) == trainer.phase.first_step:
            found = whole_gradients(trainer.train_step)
            gradients.update({f"step {step}: {name}": g for name, g in found.items()})

    trainer.train_step.optimizer.register_step_pre_hook(keep)
    run_to_end(trainer)
    return trainer, gradients


steps_left: list[float] = []  # of the whole run, as the timer gets them


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, window = tmp_path_factory.mktemp("phases") / "whole", StepTimer.window
    with pytest.MonkeyPatch.context() as patch:
        note = lambda timer, **how: steps_left.append(how["steps_left"]) or window(timer, **how)  # noqa: E731
        patch.setattr(StepTimer, "window", note)
        gradients = finish(job(folder))[1]
    torch.save(gradients, folder / "gradients.pt")
    return folder


def test_each_phase_has_its_batch_its_length_and_its_rate(whole: Path) -> None:
    rows = logged_rows(whole)
    each = [3 * [4 * 32], 3 * [8 * 32], 4 * [8 * 64]]
    tokens = [n for phase in each for n in phase]
    assert [row["tokens"] for row in rows] == [sum(tokens[: n + 1]) for n in range(STEPS)]
    rates = [0.5, *[1.0] * 6, 0.775, 0.55, 0.325]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * rate for rate in rates])
    # A step of the last phase has more than twice the FLOPs of one before, which has twice those of the first.
    flops = [4 * 32 * FLOPS(32), 8 * 32 * FLOPS(32), 8 * 64 * FLOPS(64)]
    left = [(2 * flops[0] + 3 * flops[1] + 4 * flops[2]) / flops[0], 4 * flops[2] / flops[1], 0]
    assert [steps_left[n] for n in (0, 5, 9)] == pytest.approx(left)
    data = json.loads((whole / "checkpoint" / f"step-{STEPS}" / "titan.json").read_text())[
        "data"
    ]
    assert data["part"]["first"] == 36 and data["part"]["weights"] == [1.0, 0.0]
    events = (whole / "events.jsonl").read_text()
    assert "phase 2, steps 4 to 6: 8 sequences of 32 tokens in a step" in events
    assert (
        "phase 3, steps 7 to 10: 8 sequences of 64 tokens in a step, weights = [1.0, 0.0], min_lr_"
        in events
    )


def test_the_step_before_a_phase_is_saved_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the interval and the retention: a longer run begins there, as the page on FineWeb-Edu says."""
    few = {"interval": 100, "keep_latest_k": 1}
    finish(job(tmp_path / "run", checkpoint=few))
    folder = tmp_path / "run/checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-3", "step-6"]
    # A phase that begins as planned is no warning.
    said = capsys.readouterr().out
    assert "\nphase 2, steps 4 to 6: " in said and "warning" not in said
    dist.destroy_process_group() if dist.is_initialized() else None
    # The page's number is the step before the phase of the job that it trains, and its two settings go on from there.
    page = (ROOT / "docs/data.md").read_text()
    [annealing] = load_config(ROOT / "train_configs/fineweb_edu_1b.toml").phase
    step = annealing.from_step - 1  # pyrefly: ignore[unsupported-operation]
    assert f"step {step:,}" in page and f"checkpoint/step-{step}" in page
    options = re.findall(r"checkpoint\.(initial_load_\w+) = (\S+)", page)
    assert [key for key, _ in options] == ["initial_load_path", "initial_load_model_only"]
    start = {"initial_load_path": str(folder / "step-6"), "initial_load_model_only": False}
    assert [value for _, value in options][1] == "false"
    trainer = Trainer(job(tmp_path / "longer", training={"steps": 20}, checkpoint=few | start))
    assert trainer.step == 6
    trainer.train_one_step()
    trainer.close()


def test_a_run_that_is_lost_in_each_phase_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was not saved is repeated: from steps 2, 4, 6 (the last of a phase) and 8; 3 is the last of a phase, too."""
    for last in (3, 5, 7, 9):
        trainer = Trainer(job(tmp_path))
        while trainer.step < last:
            trainer.train_one_step()
        trainer.close(failed=True)
        dist.destroy_process_group()
    finish(job(tmp_path))
    said = capsys.readouterr().out
    assert "starting from" in said and "changed since" not in said
    assert numbers(tmp_path) == numbers(whole)
    last = Path("checkpoint") / f"step-{STEPS}"
    assert same_tensors(tmp_path / last, whole / last)


def train(axes: str, folder: str) -> tuple[int, dict[str, Tensor]]:
    degrees = {f"{axis}_degree": 2 for axis in axes.split(" x ")}
    trainer, gradients = finish(job(folder, parallelism=degrees), PoolTrainer)
    pipeline = trainer.train_step.pipeline
    return pipeline.schedule.num_microbatches if pipeline else 0, gradients


@pytest.mark.parametrize(
    "axes",
    [
        "data_parallel_shard",
        "context_parallel",
        "pipeline_parallel",
        "data_parallel_shard x tensor_parallel",
    ],
)
def test_layouts_equal_one_process(axes: str, pool: Pool, whole: Path, tmp_path: Path) -> None:
    """A pipeline gets four microbatches in place of two in the last phase, data-parallel ranks accumulate in the second one."""
    results = pool.run(2 ** len(axes.split(" x ")), train, axes, str(tmp_path))
    assert {count for count, _ in results} == {4 if axes == "pipeline_parallel" else 0}
    found = [{"gradients": gradients} for _, gradients in results]
    expected = torch.load(whole / "gradients.pt")
    assert {name.split(":")[0] for name in expected} == {"step 1", "step 4", "step 7"}
    assert largest(found, {"gradients": expected}, "gradients") < BOUND
    assert max(errors(tmp_path, whole).values()) < BOUND


def course(folder: Path, data: Path, **changes: Any) -> JobConfig:
    """Conversations (60 %) and text, less of the first in a second phase of larger batches; predicts further tokens, and averages."""
    sources = [
        {
            "type": "jsonl",
            "path": str(data / "a.jsonl"),
            "messages_key": "messages",
            "weight": 0.6,
        },
        {"type": "text", "path": str(data / "a.txt"), "weight": 0.4},
    ]
    return any_job(
        folder,
        base=BASE,
        phase=[{"from_step": 4, "global_batch_size": 8, "weights": [0.3, 0.7]}],
        model={"overrides": {"n_layers": 2, "num_mtp_modules": 1}},
        tokenizer={"name": "bytes", "chat_template": str(data / "chat.jinja")},
        data={
            "sources": sources,
            "document_mask": True,
            "reset_positions": True,
            "cache_folder": str(data / "cache"),
        },
        training={"seq_len": 96},
        average={"enable": True, "decay": 0.5},
        **changes,
    )


def go_on(folder: Path, data: Path, parallelism: dict[str, int]) -> None:
    finish(course(folder, data, parallelism=parallelism), PoolTrainer)


def test_a_blend_with_conversations_resumes_in_each_phase_and_on_other_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    written(tmp_path / "a.jsonl", [chat for chat in conversations(80) if len(str(chat)) < 250])
    (tmp_path / "a.txt").write_text(" ".join(random.choice(WORDS, size=4000)))
    (tmp_path / "chat.jinja").write_text(LLAMA.replace("<|im_end|>", EOS))
    whole, lost, moved = (tmp_path / name for name in ("whole", "lost", "moved"))
    finish(course(whole, tmp_path))
    # What was not saved is repeated: from step 2, and from step 6 of the second phase.
    for folder, steps in ((lost, 3), (lost, 7), (moved, 3)):
        trainer = Trainer(course(folder, tmp_path))
        while trainer.step < steps:
            trainer.train_one_step()
        trainer.close(failed=True)
        dist.destroy_process_group()
    finish(course(lost, tmp_path))
    assert numbers(lost) == numbers(whole)
    last = Path("checkpoint") / f"step-{STEPS}"
    assert same_tensors(lost / last, whole / last)
    degrees = {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2}
    pool.run(4, go_on, moved, tmp_path, degrees)
    assert max(errors(moved, whole).values()) < BOUND


def test_each_phase_trains_with_programs_for_its_own_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that begins there does. After two shapes, torch compiles for any shape of a kind, which is slower."""
    trained: list[tuple[int, ...] | None] = []

    def watched(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if torch.is_grad_enabled():
            sizes = [n for x in inputs if isinstance(x, Tensor) for n in x.shape]
            is_static = all(
                isinstance(n, int) for n in (*inputs, *sizes) if not isinstance(n, Tensor)
            )
            trained.append(
                tuple(max((x for x in inputs if x.ndim == 3), key=Tensor.numel).shape)
                if is_static
                else None
            )
        return graph.forward

    registry.lookup_backend("eager")
    watched._tags = ("debug",)  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", watched)
    torch.compiler.reset()
    finish(
        job(
            tmp_path / "run",
            compile={"enable": True, "backend": "eager", "components": ["model"]},
            validation={
                "enable": True,
                "freq": 2,
                "steps": 1,
                "dataset": "synthetic",
                "local_batch_size": 3,
            },
        )
    )
    # The second phase only accumulates more: it takes the first one's.
    assert trained == [(2, 32, 64), (4, 64, 64)], trained


def test_a_phase_that_names_degrees_alone_keeps_the_batch() -> None:
    """512 tokens a step on two data-parallel ranks stay 512 on one, until a phase names a batch."""
    table = [
        {"from_step": 3, "tensor_parallel_degree": 2},
        {"from_step": 5, "min_lr_factor": 0.5},
        {"from_step": 7, "local_batch_size": 4},
    ]
    config = any_job(training={"steps": 8, "seq_len": 128}, phase=table)
    phases = phases_of(config, world_size=2)
    assert [phase.tokens_per_step for phase in phases] == [512] * 4
    assert [phase.layout.accumulation for phase in phases] == [1, 2, 2, 1]
    assert [phase.config.training.global_batch_size for phase in phases] == [-1, 4, 4, -1]


def test_a_batch_that_a_new_layout_cannot_keep_is_refused() -> None:
    degrees = {"tensor_parallel_degree": 2}  # 3 x 2 sequences; then 6 x 2 pass at once
    table = [{"from_step": 3, "tensor_parallel_degree": 1}]
    config = any_job(training={"steps": 8}, parallelism=degrees, phase=table)
    [*_, problem] = check_borders(config, 6)
    assert problem[0] == "phase[0].tensor_parallel_degree"
    assert "set global_batch_size or local_batch_size in the phase" in problem[1]
