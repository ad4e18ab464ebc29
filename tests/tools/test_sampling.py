"""Sampled tokens against transformers' and against whole forward passes: of batches, with windows and sinks, and split over ranks."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Pool
from titan.data.tokenizer import bytes_tokenizer
from titan.parallel import apply_tp, build_mesh, initialize, materialize
from titan.tools.answers import find_model, load_model
from titan.tools.generation import Generator, streamed

# Of lengths that share no factor; the second fills the batch.
PROMPTS = [[7, 8, 9], [*range(20, 37)], [5]]
FAMILIES = {
    "llama3": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
NEW = 12


def sizes_of(name: str) -> Any:
    config = import_module(f"titan.models.{name}").FLAVORS["tiny"]
    windows = {"window": 6} if name == "gpt_oss" else {}
    return dataclasses.replace(config, n_layers=2, **windows)


def built(name: str, degrees: dict[str, int] | None = None) -> Any:
    family, sizes = import_module(f"titan.models.{name}"), sizes_of(name)
    with torch.device("meta"):
        model = family.build_model(sizes)
    if degrees:
        mesh = build_mesh("cpu", **degrees)["tp"]
        heads, plan = sizes.n_kv_heads, family.TENSOR_PLAN
        apply_tp(model, mesh=mesh, plan=plan, num_kv_heads=heads, loss_parallel=False)
    materialize(model, device="cpu")
    initialize(model, seed=3, std_of=lambda name: 0.5 if "norm" in name else 0.2)
    return model.eval()


def greedy(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int | None]]:
    steps = list(Generator(model=model, max_new_tokens=new).stream(prompts))
    return [list(row) for row in zip(*steps, strict=True)]


def greedy_on_ranks(name: str) -> list[list[int | None]]:
    return greedy(built(name, {"tp": 2}), PROMPTS)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
def test_greedy_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf, kind = (
        import_module(f"titan.models.{name}.huggingface"),
        getattr(transformers, FAMILIES[name]),
    )
    twin = kind(kind.config_class(**hf.hf_config(sizes_of(name)))).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in twin.parameters():
        parameter.data.normal_(std=0.2 if parameter.ndim > 1 else 0.5, generator=generator)
    twin.save_pretrained(tmp_path)
    model = load_model(*find_model(tmp_path, "bytes"), device=torch.device("cpu"))
    for prompt, ours in zip(PROMPTS, greedy(model, PROMPTS), strict=True):
        ids = torch.tensor([prompt])
        theirs = twin.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gets_what_its_prompts_get_alone(name: str) -> None:
    model = built(name)
    assert greedy(model, PROMPTS) == [greedy(model, [prompt])[0] for prompt in PROMPTS]
    # Nor does the cache change them: each is the likeliest of a whole forward pass.
    tokens = greedy(model, PROMPTS[:1])[0]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + tokens]))
    assert tokens == logits[0].argmax(-1)[len(PROMPTS[0]) - 1 : -1].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "gpt_oss")),
    ],
)
def test_tensor_parallel_ranks_get_the_tokens_of_one_process(name: str, pool: Pool) -> None:
    """With a prompt of an odd length, and one of a single token, which two ranks cannot split."""
    alone = greedy(built(name), PROMPTS)
    assert pool.run(2, greedy_on_ranks, name) == [alone, alone]


def test_draws_are_limited_and_repeat() -> None:
    model = built("llama3")
    with torch.no_grad():
        p_V = torch.softmax(model(torch.tensor([PROMPTS[0]]))[0, -1] / 2, -1)
    ranked = p_V.argsort(descending=True).tolist()
    options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 2.0}

    def first(**more: Any) -> set[int | None]:
        [tokens] = Generator(model=model, **options, **more).stream([PROMPTS[0]] * 200)
        return {*tokens}

    assert first(top_k=2) == {*ranked[:2]}
    options["max_new_tokens"] = 8
    two = [
        list(Generator(model=model, **options, seed=seed).stream(PROMPTS[:2]))
        for seed in (4, 4, 5)
    ]
    assert two[0] == two[1] != two[2]
    # The second prompt's draws are those of the seed after.
    [alone] = zip(*Generator(model=model, **options, seed=5).stream(PROMPTS[1:2]), strict=True)
    assert list(alone) == [row[1] for row in two[0]]


def test_a_text_ends_at_a_stop_token_and_the_others_go_on() -> None:
    model = built("llama3")
    whole = greedy(model, PROMPTS)
    stop = {whole[0][3]}
    ends = [row.index(next(iter(stop))) if stop & {*row} else NEW for row in whole]
    assert ends[0] <= 3 < max(ends)
    steps = list(Generator(model=model, max_new_tokens=NEW, stop=stop).stream(PROMPTS))
    for row, end in enumerate(ends):
        assert [step[row] for step in steps] == whole[row][:end] + [None] * (len(steps) - end)


def test_streamed_text_never_shows_half_a_character() -> None:
    tokenizer, text = bytes_tokenizer(), "naïve 日本 x"
    parts = list(streamed(tokenizer, tokenizer.encode(text)))
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)
    assert "日" in parts
    assert "".join(streamed(tokenizer, tokenizer.encode("é")[:1])) == "\ufffd"
