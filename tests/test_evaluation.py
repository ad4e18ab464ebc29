"""Evaluation in the loop: figures by hand, the same numbers on every layout, texts, and mistakes in a task's file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.jobs import SMALL, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.config.schema import JobConfig
from titan.hooks.evaluation import Evaluation

SHIPPED = ["stdlib_choice", "stdlib_cloze"]
DEGREES = {
    "dp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
}
MOE = {"name": "qwen3", "flavor": "tiny_moe", "overrides": {"n_layers": 2, "n_dense_layers": 1}}
EVALUATED = with_changes(
    SMALL,
    training={"dataset": "stdlib", "seq_len": 128, "global_batch_size": 4, "steps": 2},
    data={"validation_fraction": 0.02},
    validation={
        "enable": True,
        "freq": 2,
        "steps": 1,
        "local_batch_size": 2,
        "prompts": ["Return the", ""],
        "prompt_tokens": 6,
    },
    checkpoint={"enable": False},
)
TASKS = [{"tasks": SHIPPED, "interval": 2, "num_examples": 6}]


def run(folder: Path, base: dict[str, Any]) -> list[list[tuple[float, bool]]]:
    """Train on a rank, and return the scores of the last evaluation's rows."""
    sections = {**base, "job": {"dump_folder": str(folder)}, "evaluation": TASKS}
    trainer = PoolTrainer(JobConfig.model_validate(sections))
    hook, scores = trainer.hook(Evaluation), []
    assert hook is not None
    score = hook.scorer.score
    hook.scorer.score = lambda *args, **how: scores.append(score(*args, **how)) or scores[-1]
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
    for each in trainer.hooks:
        each.close()
    if dist.get_world_size() > 1:
        dist.barrier()
    return scores


def shown(pool: Pool, folder: Path, base: dict[str, Any], **layout: int) -> tuple[Any, Any, Any]:
    """Return scores, the row of the step that evaluated, and the texts."""
    parallelism = {DEGREES[axis]: n for axis, n in ({"dp": 1} | layout).items()}
    ranks = math.prod(n for axis, n in layout.items() if axis != "ep")
    scores = pool.run(ranks, run, folder, with_changes(base, parallelism=parallelism))
    assert all(of_rank == scores[0] for of_rank in scores)  # every rank has all of them
    rows = read_json_lines(folder / "metrics.jsonl")
    texts = json.loads((folder / "samples.json").read_text())
    assert (folder / "samples" / "step-2.txt").read_text().count("[...]") == 2
    row = {name: value for name, value in rows[-1].items() if name.startswith("eval/")}
    assert not any(name.startswith("eval/") for name in rows[0])
    return scores[0], row, texts


def compare(found: tuple[Any, Any, Any], alone: tuple[Any, Any, Any]) -> None:
    for ours, theirs in zip(found[0], alone[0], strict=True):
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert [log_p for log_p, _ in ours] == pytest.approx([p for p, _ in theirs], rel=1e-6)
    assert found[1] == pytest.approx(alone[1], rel=1e-6)
    assert found[2] == alone[2]


def test_layouts_give_the_numbers_of_one_process(pool: Pool, tmp_path: Path) -> None:
    alone = shown(pool, tmp_path / "alone", EVALUATED)
    scores, row, texts = alone
    assert len(scores[0]) == 6 * 4 and len(scores[1]) == 6
    assert set(row) == {
        *(f"eval/stdlib_choice/{name}" for name in ("acc", "acc_norm", "log_likelihood")),
        *(f"eval/stdlib_cloze/{name}" for name in ("acc", "log_likelihood")),
    }
    assert texts["step"] == 2 and [prompt for prompt, _ in texts["texts"]] == ["Return the", ""]
    for layout in ({"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}):
        compare(shown(pool, tmp_path / str(layout), EVALUATED, **layout), alone)


def test_experts_give_the_numbers_of_one_process(pool: Pool, tmp_path: Path) -> None:
    base = with_changes(EVALUATED, model=MOE)
    alone = shown(pool, tmp_path / "alone", base)
    compare(shown(pool, tmp_path / "ep", base, dp=2, ep=2), alone)
