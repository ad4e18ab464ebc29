"""The stages of an indexer's training as phases of one run: what each trains, what metrics say, and what is refused."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.support.hf_sizes import families, overrides_of
from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.layouts import BOUND
from tests.support.ranks import Pool, RankFailed
from tests.support.runs import errors, logged_rows, same_tensors, saved_tensors
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checkpoint import CheckpointError
from titan.checks.rules import check, check_to_run
from titan.config.schema import JobConfig
from titan.huggingface import convert

STEPS = 7
STAGES = ["dense", "indexer", "joint"]
PHASES = [{"from_step": 3, "lr_factor": 2.0}, {"from_step": 5, "lr_factor": 0.5}]


def model(kind: str = "deepseek_v32", **fields: Any) -> dict[str, Any]:
    architecture = families()[kind]
    # With smaller weights, the loss of an indexer is mostly rounding.
    fields = {"vocab_size": 2048, "initializer_range": 0.1} | fields
    overrides = overrides_of(architecture) | fields
    return {"name": "transformers", "architecture": architecture, "overrides": overrides}


def job(folder: Any, *, phases: Any = PHASES, **changes: Any) -> JobConfig:
    base = with_changes(
        {k: v for k, v in SMALL.items() if k != "model"},
        model=model(),
        training={"steps": STEPS, "global_batch_size": 4},
        sparse_attention={"stages": STAGES, "loss_coeff": 0.5},
        lr_scheduler={"warmup_steps": 0},
        # A weight that decays without a gradient would show, and a gradient of rounding errors must not.
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6},
        checkpoint={"interval": 2, "keep_latest_k": 0},
    )
    config = any_job(folder, base=base, **changes)
    return JobConfig.model_validate(config.model_dump() | {"phase": phases})


def train(config: JobConfig, killed_at: int = 0) -> None:
    """Go on to the end on each rank, or to the step after which the kernel ends the process."""
    check_to_run(config, world_size=dist.get_world_size())
    trainer = PoolTrainer(config)
    if not killed_at:
        return run_to_end(trainer)
    while trainer.step < killed_at:
        trainer.train_one_step()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "whole"
    pool.run(1, train, job(folder))
    return folder


def changed(folder: Path, before: int, after: int) -> set[str]:
    """Names of the tensors of a checkpoint, of weights and of the optimizer, that differ between two steps."""
    old, new = (saved_tensors(folder / "checkpoint" / f"step-{n}") for n in (before, after))
    return {name for name in new if name not in old or not torch.equal(old[name], new[name])}


def test_each_stage_trains_its_part(whole: Path) -> None:
    names = {n for n in saved_tensors(whole / "checkpoint/step-7") if n.startswith("model.")}
    indexers = {name for name in names if ".indexer." in name}
    unmoved = {
        n for n in names if ".experts." in n or n.endswith("correction_bias")
    }  # some get no tokens
    moved = {"indexer": changed(whole, 2, 4), "joint": changed(whole, 4, 6)}
    assert moved["indexer"] & names == indexers
    assert moved["joint"] & names >= names - unmoved
    # Also the optimizer's moments and counts of all others stay.
    of_others = {n for n in moved["indexer"] if n.startswith("optim") and ".indexer." not in n}
    assert of_others == set()
    first = saved_tensors(whole / "checkpoint/step-2")
    assert not any(".indexer." in n for n in first if n.startswith("optim") and first[n].any())


def train_and_kill(pool: Pool, ranks: int, folder: Path, *legs: dict[str, int]) -> None:
    """Kill a run in each stage: after the steps 1, 3 and 5, of which only the even ones are saved."""
    for killed_at, axes in zip((1, 3, 5, 0), legs, strict=True):
        with pytest.raises(RankFailed, match="SIGKILL") if killed_at else nullcontext():
            pool.run(ranks, train, job(folder, parallelism=axes), killed_at)


def test_killed_in_each_stage_a_run_goes_on_to_the_same_bits(
    whole: Path, pool: Pool, tmp_path: Path
) -> None:
    train_and_kill(pool, 1, tmp_path, {}, {}, {}, {})
    names = ("step", "loss", "grad_norm", "lr", "indexer_loss", "indexer")
    both = [[[row.get(n) for n in names] for row in logged_rows(f)] for f in (tmp_path, whole)]
    assert both[0] == both[1]
    assert same_tensors(tmp_path / "checkpoint/step-7", whole / "checkpoint/step-7")


def test_each_stage_goes_on_in_another_layout(whole: Path, pool: Pool, tmp_path: Path) -> None:
    """From the checkpoint of FSDP 2 on TP 2, of TP 2 on CP 2: the numbers of one process that never stopped."""
    keys = ("data_parallel_shard", "tensor_parallel", "context_parallel")
    fsdp, tp, cp = ({f"{key}_degree": 2} for key in keys)
    train_and_kill(pool, 2, tmp_path, fsdp, fsdp, tp, cp)
    found = errors(tmp_path, whole)
    assert max(found.values()) < BOUND, found
    both = [[row["indexer_loss"] for row in logged_rows(f)[2:]] for f in (tmp_path, whole)]
    assert both[0] == pytest.approx(both[1], rel=BOUND)


def test_a_start_from_a_checkpoint_has_its_trained_indexers(
    whole: Path, tmp_path: Path
) -> None:
    """Also from a Hugging Face folder, which is refused if it has none."""
    saved, out = saved_tensors(whole / "checkpoint/step-7"), tmp_path / "hf"
    assert convert.main(["to-hf", str(whole), str(out)]) == 0

    def start(path: Path) -> None:
        keys = {"initial_load_path": str(path), "initial_load_in_hf": path == out}
        trainer = Trainer(job(tmp_path / path.name, checkpoint=keys))
        for name, parameter in trainer.train_step.model_parts[0].named_parameters():
            assert torch.equal(parameter, saved[f"model.{name}"]), name
        trainer.close()

    start(whole / "checkpoint/step-7")
    start(out)
    [file] = out.glob("*.safetensors")
    save_file({n: x for n, x in load_file(file).items() if ".indexer." not in n}, file)
    with pytest.raises(CheckpointError, match=r"indexer\S+ is missing"):
        start(out)


def test_metrics_have_loss_and_recall_by_layer(whole: Path) -> None:
    rows = logged_rows(whole)
    assert ["indexer" in row for row in rows] == [False, False, *[True] * 5]
    for row in rows[2:]:
        found = row["indexer"]
        assert found["layer"] == [0, 1, 2, 3]
        assert all(0 < value < 1 for value in found["recall"])
        assert row["indexer_loss"] == pytest.approx(sum(found["loss"]) / 4, rel=1e-4)
    # Over all keys the loss is another one than over the chosen keys.
    assert rows[2]["indexer_loss"] > 0 and rows[4]["indexer_loss"] > 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"phases": PHASES[:1]}, "names 3 stages, and the job has 2 phases"),
    ({"sparse_attention": {"loss_coeff": 0}}, "is 0, and nothing would learn"),
    (
        {"optimizer": {"early_step_in_backward": True}, "training": {"max_norm": 0}},
        "set optimizer.early_step_in_backward = false",
    ),
    (
        {"model": {**model(), "architecture": "LlamaForCausalLM", "overrides": {}}},
        "has no indexer",
    ),
    (
        {
            "model": model("glm_moe_dsa", indexer_types=["full", "full", "shared", "full"]),
            "parallelism": {"pipeline_parallel_degree": 2},
        },
        "pipeline stage 1 would begin with layers.2, which reads the choice of layers.1: begin it with",
    ),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_what_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    messages = [problem.message for problem in check(job(tmp_path, **changes))]
    assert any(words in message for message in messages), messages
