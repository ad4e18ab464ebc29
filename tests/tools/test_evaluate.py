"""`titan evaluate` on a step and on the exported folder, beside the figures of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.commands import Shell
from tests.support.jobs import SMALL, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.config.schema import JobConfig, JsonlSource
from titan.contrib.evaluation import evaluate
from titan.contrib.evaluation.examples import shipped
from titan.data.sources import open_documents
from titan.tools import tokenizer

NUM_EXAMPLES = 8


def train(config: JobConfig) -> None:
    trainer = PoolTrainer(config)
    while trainer.step < trainer.last_step:
        trainer.train_one_step()
    for hook in trainer.hooks:
        hook.close()


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder on two ranks with its last weights as a Hugging Face folder, too."""
    folder = tmp_path_factory.mktemp("trained")
    source = JsonlSource(path=str(shipped()["stdlib_cloze"]), text_key="context")
    tokenizer.train(open_documents(source), vocab_size=400, output=folder / "words")
    sections = with_changes(
        SMALL,
        job={"dump_folder": str(folder / "run")},
        model={"overrides": {"n_layers": 2, "vocab_size": 400}},
        tokenizer={"path": str(folder / "words")},
        training={"dataset": "jsonl", "dataset_path": source.path, "seq_len": 128, "steps": 8},
        data={"sources": [{"type": "jsonl", "path": source.path, "text_key": "context"}]},
        checkpoint={"last_save_in_hf": True},
        average={"enable": True, "decay": 0.5, "validate_with": False},
    )
    del sections["training"]["dataset"], sections["training"]["dataset_path"]
    tasks = [{"tasks": [*shipped()], "num_examples": NUM_EXAMPLES}]
    pool.run(2, train, JobConfig.model_validate(sections | {"evaluation": tasks}))
    step = folder / "run" / "checkpoint" / "step-8"
    for file in (step / "config.json", *step.glob("tokenizer*"), *step.glob("model*")):
        (folder / "run" / "hf").mkdir(exist_ok=True)
        file.rename(folder / "run" / "hf" / file.name)
    return folder / "run"


def in_loop(run: Path) -> dict[str, float]:
    row = read_json_lines(run / "metrics.jsonl")[-1]
    return {name[5:]: value for name, value in row.items() if name.startswith("eval/")}


def scored(argv: list[str]) -> dict[str, float]:
    """On a rank: the figures of `titan evaluate`."""
    args, overrides = evaluate.parse([*argv, "--num-examples", str(NUM_EXAMPLES)])
    size = torch.distributed.get_world_size()
    weights = evaluate.find_weights(args.folder, overrides, tokenizer="", world_size=size)
    scorer = evaluate.build_scorer(weights, device=torch.device("cpu"), average=args.average)
    return evaluate.score(scorer, args)


def test_a_step_and_a_folder_score_as_the_run_did(pool: Pool, trained: Path) -> None:
    tasks = ["--tasks", ",".join(shipped())]
    hf = f"{trained}/hf --training.seq_len=128".split()
    for ranks, argv in (
        (1, [str(trained), *tasks]),
        (2, [*hf, *tasks, "--parallelism.tensor_parallel_degree=2"]),
    ):
        for figures in pool.run(ranks, scored, argv):
            assert figures == pytest.approx(in_loop(trained), rel=1e-6)


def test_the_average_scores_as_its_export_does(
    pool: Pool, trained: Path, tmp_path: Path, shell: Shell
) -> None:
    argv, tasks = ["--dtype", "float32", "--average"], ["--tasks", ",".join(shipped())]
    shell(f"convert to-hf {trained} {tmp_path}/hf", *argv)
    size = "--training.seq_len=128"
    [expected] = pool.run(1, scored, [str(tmp_path / "hf"), *tasks, size])
    for figures in pool.run(2, scored, [str(trained), *tasks, "--average"]):
        assert figures == pytest.approx(expected, rel=1e-6)
        assert figures != pytest.approx(in_loop(trained), rel=1e-5)
    assert "hf: holds no average of the weights; the job needs average.enable" in shell.refuse(
        f"evaluate {tmp_path}/hf", *tasks, "--average"
    )


def test_an_answer_that_no_row_holds_is_refused(
    trained: Path, tmp_path: Path, shell: Shell
) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"context": "a", "target": "%s"}' % ("b" * 301))
    printed = shell(f"evaluate {trained} --tasks {file}", code=2)
    said = "an answer has 300 tokens, and training.seq_len is 128: raise that, or shorten"
    assert said in printed.err
    job = tmp_path / "job.toml"
    job.write_text(f"[training]\nseq_len = 128\n[[evaluation]]\ntasks = ['{file}']\n")
    printed = shell(f"check {job} --tokenizer.name=bytes", code=2)
    found = f"job.toml:4: evaluation[0].tasks: {file}: an answer has 301 tokens, and training.seq_len is 128"
    assert found in printed.err
