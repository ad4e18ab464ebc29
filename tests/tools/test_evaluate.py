"""`titan evaluate`, and lm-evaluation-harness on the same weights: its own model on the exported folder, and titan's within it."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.support.jobs import SMALL, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer
from titan.cli import main as titan
from titan.config.schema import JobConfig, JsonlSource
from titan.data.examples import shipped
from titan.data.sources import open_documents
from titan.tools import evaluate, tokenizer

NUM_EXAMPLES = 8
# The shipped tasks, as a user of the harness would write them down; a text, and questions to answer freely.
COMMON = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: %s}}\ndoc_to_text: '{{context}}'\n"
HARNESS = {
    "harness_choice": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "harness_cloze": "output_type: loglikelihood\ndoc_to_target: '{{target}}'\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: perplexity}]\n",
    "harness_text": "output_type: loglikelihood_rolling\ndoc_to_target: '{{context}}{{target}}'\nmetric_list: [{metric: bits_per_byte}]\n",
    "harness_free": "output_type: generate_until\ndoc_to_target: '{{target}}'\n"
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n",
}


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
    hf = [str(trained / "hf"), "--training.seq_len=128"]
    for ranks, argv in (
        (1, [str(trained), *tasks]),
        (2, [*hf, *tasks, "--parallelism.tensor_parallel_degree=2"]),
    ):
        for figures in pool.run(ranks, scored, argv):
            assert figures == pytest.approx(in_loop(trained), rel=1e-6)


def test_the_average_scores_as_its_export_does(
    pool: Pool, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, tasks = ["--dtype", "float32", "--average"], ["--tasks", ",".join(shipped())]
    assert titan(["convert", "to-hf", str(trained), str(tmp_path / "hf"), *argv]) == 0
    size = "--training.seq_len=128"
    [expected] = pool.run(1, scored, [str(tmp_path / "hf"), *tasks, size])
    for figures in pool.run(2, scored, [str(trained), *tasks, "--average"]):
        assert figures == pytest.approx(expected, rel=1e-6)
        assert figures != pytest.approx(in_loop(trained), rel=1e-5)
    assert titan(["evaluate", str(tmp_path / "hf"), *tasks, "--average"]) == 2
    assert (
        "hf: holds no average of the weights; the job needs average.enable"
        in capsys.readouterr().err
    )


def test_an_answer_that_no_row_holds_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by the harness, whose own model scores no answer beyond its length either."""
    file = tmp_path / "long.jsonl"
    file.write_text('{"context": "a", "target": "%s"}' % ("b" * 301))
    assert titan(["evaluate", str(trained), "--tasks", str(file)]) == 2
    said = "an answer has 300 tokens, and training.seq_len is 128: raise that, or shorten"
    assert said in capsys.readouterr().err
    job = tmp_path / "job.toml"
    job.write_text(f"[training]\nseq_len = 128\n[[evaluation]]\ntasks = ['{file}']\n")
    assert titan(["check", str(job), "--tokenizer.name=bytes"]) == 2
    found = f"job.toml:4: evaluation[0].tasks: {file}: an answer has 301 tokens, and training.seq_len is 128"
    assert found in capsys.readouterr().err


def harness_tasks(folder: Path) -> str:
    for name, text in HARNESS.items():
        data = shipped()["stdlib_choice" if name == "harness_choice" else "stdlib_cloze"]
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON % data}{text}")
    return str(folder)


def asked(argv: list[str]) -> tuple[dict[str, float], list[str]]:
    """On a rank: the harness's figures with titan's model, and what that answers freely."""
    from titan.tools import lm_eval_model

    texts: list[list[str]] = []
    model = lm_eval_model.TitanLM
    answer = model.generate_until
    model.generate_until = lambda *of: texts.append(answer(*of)) or texts[-1]  # pyright: ignore
    return scored(argv), texts[0]


@pytest.mark.slow  # the harness imports what else it has
def test_the_harness_says_the_same(
    pool: Pool, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    pytest.importorskip("accelerate", reason="the harness's own model needs it")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "tasks").mkdir()
    include, hf = harness_tasks(tmp_path / "tasks"), str(trained / "hf")
    found, samples = {}, {}
    # Of whole texts, which the harness begins by itself, a tokenizer that does so too would begin them twice.
    for add_bos, names in ((True, [*[*HARNESS][:2], "harness_free"]), (None, ["harness_text"])):
        options: Any = {"pretrained": hf, "device": "cpu", "dtype": "float32", "batch_size": 4}
        theirs: Any = simple_evaluate(
            model=HFLM(**options, max_length=128, add_bos_token=add_bos),
            tasks=names,
            limit=NUM_EXAMPLES,
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=include),
        )
        samples |= theirs["samples"]
        found |= {
            f"{task}/{name.removesuffix(',none')}": float(value)
            for task, figures in theirs["results"].items()
            for name, value in figures.items()
            if isinstance(value, float) and "_stderr" not in name
        }
    loop = in_loop(trained)
    # Their perplexity is the exponential of a mean: of the exponent, 1e-6 can be asked.
    log_p = -math.log(found["harness_cloze/perplexity"])
    assert log_p == pytest.approx(loop["stdlib_cloze/log_likelihood"], rel=1e-6)
    for name in ("choice/acc", "choice/acc_norm", "cloze/acc"):
        assert found[f"harness_{name}"] == loop[f"stdlib_{name}"]
    answers = [
        sample["filtered_resps"][sample["doc"]["answer"]][0] for sample in samples["harness_choice"]
    ]
    expected = loop["stdlib_choice/log_likelihood"]
    assert fmean(map(float, answers)) == pytest.approx(expected, rel=1e-6)
    argv = [hf, "--tasks", ",".join(HARNESS), "--include-path", include, "--training.seq_len=128"]
    for ours, texts in pool.run(2, asked, argv):
        assert ours.keys() == found.keys()
        for name, value in found.items():
            scale = math.log if name.endswith("perplexity") else float
            assert scale(ours[name]) == pytest.approx(scale(value), rel=1e-6), name
        by_number = sorted(samples["harness_free"], key=lambda sample: sample["doc_id"])
        assert texts == [sample["resps"][0][0] for sample in by_number]
        assert any(texts)
