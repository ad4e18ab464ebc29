"""Evaluation in the loop: figures by hand, the same numbers on every layout, texts, and mistakes in a task's file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import SMALL, degrees_of, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.tables import table as rows_of
from tests.support.trainers import PoolTrainer
from titan.base.untrusted import InputError
from titan.checks.rules import check
from titan.config.schema import JobConfig
from titan.contrib.evaluation.evaluate import table
from titan.contrib.evaluation.examples import Example, ExampleTask, read_task
from titan.contrib.evaluation.hook import Evaluation
from titan.contrib.evaluation.passes import plan_passes
from titan.contrib.evaluation.scoring import Scorer, score_rows
from titan.data.tokenizer import bytes_tokenizer
from titan.losses.loss import IGNORED, LossSum

SHIPPED = ["stdlib_choice", "stdlib_cloze"]
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
    score: Any = hook.scorer.score
    hook.scorer.score = lambda *args, **how: scores.append(score(*args, **how)) or scores[-1]
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
    for each in trainer.hooks:
        each.close()
    if dist.get_world_size() > 1:
        dist.barrier()
    return scores


def shown(
    pool: Pool, folder: Path, base: dict[str, Any], **layout: int
) -> tuple[Any, Any, Any]:
    """Return scores, the row of the step that evaluated, and the texts."""
    parallelism = degrees_of({"dp": 1} | layout)
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


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    return shown(pool, tmp_path_factory.mktemp("alone"), EVALUATED)


def test_what_is_shown(alone: tuple[Any, Any, Any]) -> None:
    scores, row, texts = alone
    assert len(scores[0]) == 6 * 4 and len(scores[1]) == 6
    assert set(row) == {
        *(f"eval/stdlib_choice/{name}" for name in ("acc", "acc_norm", "log_likelihood")),
        *(f"eval/stdlib_cloze/{name}" for name in ("acc", "log_likelihood")),
    }
    assert texts["step"] == 2 and [prompt for prompt, _ in texts["texts"]] == ["Return the", ""]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_layouts_give_the_numbers_of_one_process(
    pool: Pool, tmp_path: Path, alone: tuple[Any, Any, Any], layout: dict[str, int]
) -> None:
    compare(shown(pool, tmp_path, EVALUATED, **layout), alone)


def test_experts_give_the_numbers_of_one_process(pool: Pool, tmp_path: Path) -> None:
    base = with_changes(EVALUATED, model=MOE)
    alone = shown(pool, tmp_path / "alone", base)
    compare(shown(pool, tmp_path / "ep", base, dp=2, ep=2), alone)


def test_figures_by_hand() -> None:
    examples = [
        Example("", ["a", "bcd"], 1),
        Example("", ["ab", "c"], 0),
        Example("", ["x", "y"]),
    ]
    # Likeliest: the first, the first (both are, and the first counts), the second. By length: the second, the first, the second.
    scores = [
        (-1.0, True),
        (-1.5, False),
        (-2.0, True),
        (-2.0, False),
        (-3.0, False),
        (-1.0, True),
    ]
    figures = ExampleTask("t", "choices", examples).figures(scores)
    assert figures == pytest.approx(
        {"acc": 1 / 3, "acc_norm": 2 / 3, "log_likelihood": -(1.5 + 2.0 + 3.0) / 3}
    )
    # As lm_eval.api.metrics.mean_stderr: the sample standard deviation over the root of n.
    assert table({f"t/{name}": figure for name, figure in figures.items()})[:2] == [
        "task  n  metric          value    stderr  chance",
        "t     3  acc             0.3333   0.3333  0.5000",
    ]
    cloze = ExampleTask("t", "target", [Example("", ["a"]), Example("", ["b"])])
    assert cloze.figures([(-1.0, True), (-3.0, False)]) == {"acc": 0.5, "log_likelihood": -2.0}


@pytest.mark.parametrize("chunk_tokens", [0, 50])
@pytest.mark.parametrize("with_output", [False, True])
def test_scores_of_rows(chunk_tokens: int, with_output: bool) -> None:
    torch.manual_seed(0)
    output = torch.nn.Linear(16, 40, bias=False) if with_output else None
    hidden = torch.randn(4, 70, 16 if with_output else 40)
    with torch.no_grad():
        log_p = (output(hidden) if output is not None else hidden).double().log_softmax(-1)
    labels = torch.full((4, 70), IGNORED)
    labels[0] = torch.randint(40, (70,))  # more than a chunk holds
    labels[1, 60:] = log_p[1, 60:].argmax(-1)
    labels[3, 5] = 7
    found = score_rows(LossSum(chunk_tokens, output=output), hidden, labels)
    chosen = log_p.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    torch.testing.assert_close(found[:, 0], chosen.sum(1), rtol=1e-6, atol=1e-6)
    not_greedy = (labels >= 0) & (labels != log_p.argmax(-1))
    assert found[:, 1].tolist() == not_greedy.sum(1).tolist()
    assert found[1, 1] == 0 and found[0, 1] > 0 and found[2].tolist() == [0, 0, 0]
    last = [log_p[0, 69].argmax(), log_p[1, 69].argmax(), torch.tensor(0), log_p[3, 5].argmax()]
    assert found[:, 2].tolist() == [number.item() for number in last]


def scorer(**data: Any) -> Scorer:
    """Return a scorer that encodes bytes, and has no model."""
    config = JobConfig.model_validate({"data": data, "training": {"seq_len": 256}})
    step = SimpleNamespace(
        config=config, mesh=SimpleNamespace(mesh_dim_names=()), loss_sum=None
    )
    return Scorer(step, bytes_tokenizer())


def test_rows_begin_and_are_cut() -> None:
    text, begin = list(b"ab cd"), 256
    assert scorer().row("ab", " cd") == ([begin, *text], 3)
    assert scorer().row("ab ", "cd") == ([begin, *text], 3)  # the space goes to what is scored
    assert scorer(add_bos=False).row("ab", " cd") == (text, 3)
    for add_bos in (True, False):  # something must predict the first token
        assert scorer(add_bos=add_bos).row("", "ab cd") == ([begin, *text], 5)
    # One row a pass, longest first.
    passes = plan_passes([1, 32, 33, 100, 256], 256, batch=1, world=1, unit=32)
    assert passes == [([4], 256), ([3], 128), ([2], 64), ([1], 32), ([0], 32)]


GOOD = '{"context": "a", "choices": ["b", "c"], "answer": 0}'


@pytest.mark.parametrize(
    ("lines", "expected"),
    rows_of(__file__, "a_line_without_an_answer_is_named"),
)
def test_a_line_without_an_answer_is_named(
    tmp_path: Path, lines: list[str], expected: str
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(InputError) as error:
        read_task(str(file))
    assert f"{file}{expected}" in str(error.value)


def test_another_task_of_a_model_has_none(tmp_path: Path) -> None:
    changes = {"evaluation": [{"tasks": SHIPPED}], "model": {"name": "flux", "flavor": "tiny"}}
    problems = check(JobConfig.model_validate(changes))
    assert "evaluation: needs next-token prediction" in "\n".join(map(str, problems))
