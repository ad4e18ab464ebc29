"""`titan evaluate` against lm-evaluation-harness's own model on folders with the conventions of six families, without any option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Pool
from tests.support.scripted import SHAPES, write_folder
from tests.support.tables import table
from titan.contrib.evaluation import evaluate
from titan.data import DataError

pytestmark = pytest.mark.slow  # the harness imports what else it has
ROWS = table(__file__, "rows")
COMMON = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: %s}}\ndoc_to_text: '{{context}}'\n"
FREE = "output_type: generate_until\ndoc_to_target: '{{target}}'\nmetric_list: [{metric: exact_match}]\n"
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: 0\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "cloze": "output_type: loglikelihood\ndoc_to_target: '{{target}}'\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: perplexity}]\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_target: '{{context}}{{target}}'\nmetric_list: [{metric: bits_per_byte}]\n",
    "free": FREE + "generation_kwargs: {until: ['\\n', ' and'], max_gen_toks: 9}\n",
    "empty": FREE + "generation_kwargs: {until: ['', '\\n\\n'], max_gen_toks: 9}\n",
    "alias": FREE + "generation_kwargs: {until: [], max_new_tokens: 2}\n",
}


def write(folder: Path, tasks: dict[str, str]) -> str:
    folder.mkdir()
    for name, text in tasks.items():
        # The harness cannot go on from nothing.
        rows = [row for row in ROWS if row["context"] or not text.startswith(FREE)]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON % data}{text}")
    return str(folder)


def asked(argv: list[str]) -> tuple[dict[str, float], list[str]]:
    """On a rank: the harness's figures with titan's model, and all that it writes freely."""
    from titan.contrib.evaluation import harness

    texts: list[str] = []
    model: Any = harness.TitanLM
    answer = model.generate_until
    model.generate_until = lambda *of: texts.extend(answer(*of)) or texts[-len(of[1]) :]
    args, overrides = evaluate.parse(argv)
    try:
        weights = evaluate.find_weights(args.folder, overrides, tokenizer="", world_size=1)
        scorer = evaluate.build_scorer(weights, device=torch.device("cpu"))
        return evaluate.score(scorer, args), texts
    finally:
        model.generate_until = answer


def refusal(argv: list[str]) -> str:
    with pytest.raises(DataError) as found:
        asked(argv)
    return str(found.value)


@pytest.mark.parametrize("name", SHAPES)
def test_figures_are_the_harness_own(
    name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    pytest.importorskip("accelerate", reason="the harness's own model needs it")
    from lm_eval import simple_evaluate  # takes the folder above for it
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = write_folder(folder := tmp_path / name, shape := SHAPES[name], scripts={})
    text = tokenizer.encode(" brown dogs and", add_special_tokens=False).tokens
    begin = tokenizer.encode("the quick", add_special_tokens=False).tokens[-1]
    # A special token that is not the end-of-text token.
    mark = next(name for name in shape.specials if name not in shape.ends)
    words = [text[0], mark, *text[1:], shape.ends[-1], "e"]
    write_folder(folder, shape, scripts={begin: words})
    special = f"generation_kwargs: {{until: ['none', '{mark}'], max_gen_toks: 9}}\n"
    include = write(tmp_path / "tasks", tasks := {**TASKS, "special": FREE + special})
    theirs = simple_evaluate(
        model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1),
        tasks=[*tasks],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=include),
    )
    expected = {
        f"{task}/{key.removesuffix(',none')}": float(value)
        for task, figures in theirs["results"].items()
        for key, value in figures.items()
        if isinstance(value, float) and "_stderr" not in key
    }
    argv = [str(folder), "--tasks", ",".join(tasks), "--include-path", include]
    [(found, texts)] = pool.run(1, asked, argv)
    assert found == pytest.approx(expected, rel=1e-6)
    free = [task for task in tasks if task in ("free", "empty", "alias", "special")]
    samples = [
        s for task in free for s in sorted(theirs["samples"][task], key=lambda s: s["doc_id"])
    ]
    assert sorted(texts) == sorted(s["resps"][0][0] for s in samples)
    assert expected["text/bits_per_byte"] > 0 and any(texts)


def test_limits_without_room_for_a_prompt_are_refused(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
    write_folder(folder := tmp_path / "hf", SHAPES["llama3"], scripts={}, positions=64)
    tasks = {"long": FREE + "generation_kwargs: {until: ['x'], max_gen_toks: 64}\n"}
    include = write(tmp_path / "tasks", tasks)
    argv = [*f"{folder} --tasks long --include-path".split(), include]
    [found] = pool.run(1, refusal, argv)
    assert "max_gen_toks 64 leaves no room for a prompt in training.seq_len = 64" in found
