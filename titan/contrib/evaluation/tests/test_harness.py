"""lm-evaluation-harness on the same weights: its own model on the exported folder, and titan's within it."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.tools.test_evaluate import NUM_EXAMPLES, in_loop, scored, trained
from titan.contrib.evaluation.examples import shipped

__all__ = ["trained"]  # a fixture

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


def harness_tasks(folder: Path) -> str:
    for name, text in HARNESS.items():
        data = shipped()["stdlib_choice" if name == "harness_choice" else "stdlib_cloze"]
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON % data}{text}")
    return str(folder)


def asked(argv: list[str]) -> tuple[dict[str, float], list[str]]:
    """On a rank: the harness's figures with titan's model, and what that answers freely."""
    from titan.contrib.evaluation import harness

    texts: list[list[str]] = []
    model: Any = harness.TitanLM
    answer = model.generate_until
    model.generate_until = lambda *of: texts.append(answer(*of)) or texts[-1]
    return scored(argv), texts[0]


@pytest.mark.slow  # the harness imports what else it has
def test_the_harness_says_the_same(
    pool: Pool, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    pytest.importorskip("accelerate", reason="the harness's own model needs it")
    from lm_eval import simple_evaluate  # takes the folder above for it
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "tasks").mkdir()
    include, hf = harness_tasks(tmp_path / "tasks"), str(trained / "hf")
    found, samples = {}, {}
    # Of whole texts, which the harness begins by itself, a tokenizer that does so too would begin them twice.
    for add_bos, names in ((True, [*[*HARNESS][:2], "harness_free"]), (None, ["harness_text"])):
        options = {"pretrained": hf, "device": "cpu", "dtype": "float32", "batch_size": 4}
        theirs = simple_evaluate(
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
        sample["filtered_resps"][sample["doc"]["answer"]][0]
        for sample in samples["harness_choice"]
    ]
    expected = loop["stdlib_choice/log_likelihood"]
    assert fmean(map(float, answers)) == pytest.approx(expected, rel=1e-6)
    argv = [
        hf,
        "--tasks",
        ",".join(HARNESS),
        "--include-path",
        include,
        "--training.seq_len=128",
    ]
    for ours, texts in pool.run(2, asked, argv):
        assert ours.keys() == found.keys()
        for name, value in found.items():
            scale = math.log if name.endswith("perplexity") else float
            assert scale(ours[name]) == pytest.approx(scale(value), rel=1e-6), name
        by_number = sorted(samples["harness_free"], key=lambda sample: sample["doc_id"])
        assert texts == [sample["resps"][0][0] for sample in by_number]
        assert any(texts)
