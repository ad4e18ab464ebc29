"""Where texts begin and end: greedy text and log-likelihoods against transformers, on folders with the conventions of six families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Shell
from tests.support.ranks import Pool
from tests.support.scripted import SHAPES, write_folder
from titan.contrib.evaluation import evaluate

transformers = pytest.importorskip("transformers")

ASKED = [{"role": "user", "content": "how are you"}]
PROMPTS = ["the quick", "how", "Hello naïve", " you are "]
PAIRS = [
    ("the quick", " brown fox"),
    ("how are ", "you today"),
    ("", "lazy dogs"),
    ("rain falls", " down\n"),
    (" f", "ox"),  # one token together
]


def answer_of(tokenizer: Any, name: str) -> list[str]:
    ids = tokenizer.encode(" fox jumps over lazy", add_special_tokens=False).tokens
    channel = ["<|channel|>", "<|message|>"] if name == "gpt_oss" else []
    return [*channel, *ids]


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers end with the template's token, and texts with another one of generation_config.json where there are several."""
    name, shape = request.param, SHAPES[request.param]
    path = tmp_path_factory.mktemp("scripted") / name
    tokenizer = write_folder(path, shape, scripts={})
    last = {
        "llama3": "Ċ",
        "qwen3": "Ċ",
        "gpt_oss": "t",
        "gemma3": "<0x0A>",
        "mistral": "[/INST]",
    }
    begin = last.get(name) or shape.specials[1]
    if name == "gpt_oss":
        begin = tokenizer.encode("assistant", add_special_tokens=False).tokens[-1]
    if name in ("llama3", "qwen3", "gemma3"):
        begin = tokenizer.encode("\n\n" if name == "llama3" else "\n", add_special_tokens=False)
        begin = begin.tokens[-1]
    answer = answer_of(tokenizer, name)
    in_template = {"gemma3": "<end_of_turn>", "qwen3": "<|im_end|>"}.get(name, shape.eos)
    text = tokenizer.encode(" brown dogs and", add_special_tokens=False).tokens
    after_text = tokenizer.encode("the quick", add_special_tokens=False).tokens[-1]
    scripts = {
        begin: [*answer, in_template],
        # Another end than the answers'. What would come after it is never shown.
        after_text: [*text, shape.ends[-1], "e"],
    }
    write_folder(path, shape, scripts=scripts)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return transformers.AutoTokenizer.from_pretrained(folder), model


def greedy(theirs: tuple[Any, Any], ids: list[int]) -> tuple[str, str]:
    """Return transformers' prompt and continuation, of the text of both."""
    tokenizer, model = theirs
    found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, found))
    assert whole.startswith(before)
    return before, whole[len(before) :]


def generated(shell: Shell, folder: Path, *argv: str) -> str:
    options = ["--temperature", "0", "--max-new-tokens", "12", "--device", "cpu"]
    return shell(f"generate --checkpoint {folder}", *argv, *options).out.removesuffix("\n")


def test_texts_and_answers_end_where_transformers_ends_them(
    folder: Path, theirs: tuple[Any, Any], tmp_path: Path, shell: Shell
) -> None:
    rows: list[Any] = [{"prompt": text} for text in PROMPTS] + [{"messages": ASKED}]
    expected = [greedy(theirs, theirs[0](text).input_ids)[1] for text in PROMPTS]
    chat = theirs[0].apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    expected.append(greedy(theirs, chat)[1])
    assert expected[0] == " brown dogs and" and expected[-1].endswith(" fox jumps over lazy")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = generated(shell, folder, "--prompts", str(file)).splitlines()
    assert [json.loads(line)["completion"] for line in lines] == expected
    streamed = generated(shell, folder, "--prompt", PROMPTS[0])
    assert streamed == PROMPTS[0] + expected[0]
    assert generated(shell, folder, "--chat", "--prompt", "how are you") == expected[-1]


def scored(
    folder: str, pairs: list[tuple[str, str]]
) -> tuple[list[tuple[float, bool]], Mapping[str, str]]:
    """On a rank: the scores of pairs, and what a run prints beside a validation."""
    weights = evaluate.find_weights(Path(folder), [], tokenizer="", world_size=1)
    scorer = evaluate.build_scorer(weights, device=torch.device("cpu"))
    scores = scorer.score([scorer.row(*pair) for pair in pairs], batch=4)
    section = {"prompts": PROMPTS, "prompt_tokens": 12}
    section = weights.config.validation.model_copy(update=section)
    return scores, scorer.continue_prompts(section)


def test_log_likelihoods_are_transformers(
    pool: Pool, folder: Path, theirs: tuple[Any, Any]
) -> None:
    tokenizer, model = theirs
    expected = []
    for context, continuation in PAIRS:
        whole = tokenizer(context + continuation).input_ids
        num_context = len(tokenizer(context.rstrip()).input_ids)
        own = tokenizer(context + continuation, add_special_tokens=False).input_ids
        if (
            not context or len(whole) == 1
        ):  # lm-evaluation-harness begins a text without context so
            bos = tokenizer.bos_token_id
            whole, num_context = [tokenizer.eos_token_id if bos is None else bos, *own], 1
        num_context = min(num_context, len(whole) - 1)
        with torch.no_grad():
            log_p = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        places = range(num_context, len(whole))
        expected.append(
            (
                sum(log_p[n - 1, whole[n]].item() for n in places),
                all(log_p[n - 1].argmax() == whole[n] for n in places),
            )
        )
    [(found, samples)] = pool.run(1, scored, str(folder), PAIRS)
    assert samples == {text: greedy(theirs, tokenizer(text).input_ids)[1] for text in PROMPTS}
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (ours, _), (reference, _) in zip(found, expected, strict=True):
        assert ours == pytest.approx(reference, rel=1e-6) and ours < 0
