"""Models of transformers with the options of a job: compared with transformers alone, or in 8 bits with one process."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.support.hf_families import (
    BOUND,
    compare,
    families,
    is_equal,
    job_of,
    num_ranks,
    overrides_of,
    reference,
    row_of,
    std_of,
    train,
    twin_with,
)
from tests.support.ranks import Pool
from tests.support.tables import table
from titan.checks.layout_rules import _check_plug_in
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.schema import ModelSection
from titan.contrib.evaluation import evaluate
from titan.contrib.transformers import build_model
from titan.parallel import apply_tp, build_mesh, initialize, materialize
from titan.tools.generation import Generator

COMPILED = {
    "compile": {"enable": True, "backend": "aot_eager"},
    "activation_checkpoint": {"mode": "selective"},
}


def test_recomputed_and_compiled(pool: Pool) -> None:
    layouts = {"TP": {"tp": 2}, "PP": {"pp": 2}}
    row = row_of(pool, "qwen3", layouts, more=dict.fromkeys(layouts, COMPILED))
    assert all(is_equal(row[name]) for name in layouts), row


# ---- float8 --------------------------------------------------------------------------------------


def train_in_float8(
    kind: str, degrees: dict[str, int], draw: int, kept: list[str]
) -> dict[str, Any]:
    fields = overrides_of(families()[kind]) | {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    }
    fields |= {"num_key_value_heads": fields["num_attention_heads"]}
    fields |= {key: 32 for key in ("q_lora_rank", "kv_lora_rank") if key in fields}
    names = [name for name in fields if hasattr(_config_class(kind)(), name)]
    float8 = {"emulate": True, "recipe_name": "tensorwise", "filter_fqns": ["output", *kept]}
    more = {
        "model": {
            "name": "transformers",
            "architecture": families()[kind],
            "overrides": {name: fields[name] for name in names},
            "converters": ["quantize.linear.float8"],
        },
        "quantize": {"linear": {"float8": float8}},
    }
    return train(families()[kind], degrees, fields, draw=draw, more=more)


def _config_class(kind: str) -> Any:
    return getattr(transformers, families()[kind]).config_class


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "deepseek_v3"])
def test_scales_of_tensor_parallel_ranks_are_one_process(kind: str, pool: Pool) -> None:
    """As tests/parallel/test_float8.py: some draw flips no rounding, and with another scale none would be equal."""
    distances = []
    for draw in range(8):
        runs = pool.run(2, train_in_float8, kind, {"tp": 2}, draw, [])
        [alone] = pool.run(1, train_in_float8, kind, {}, draw, runs[0]["kept"])
        found = [compare(run, alone) for run in runs]
        away = {name: max(run[name] for run in found) for name in found[0]}
        distances.append(max(v for n, v in away.items() if n.startswith("gradients")))
        if distances[-1] < BOUND:
            return
    pytest.fail(f"no draw meets {BOUND}: {distances}")


# ---- checkpoints ---------------------------------------------------------------------------------


def drawn(architecture: str, fields: dict[str, Any]) -> Any:
    """Return titan's model with drawn weights, on tensor-parallel ranks if there are several."""
    sizes = job_of(architecture, {}, fields).model.sizes
    with torch.device("meta"):
        model = build_model(sizes)
    ranks = torch.distributed.get_world_size()
    if ranks > 1:
        mesh = build_mesh("cpu", tp=ranks)["tp"]
        apply_tp(
            model,
            mesh=mesh,
            plan=model.tensor_plan,
            num_kv_heads=sizes.n_kv_heads,
            loss_parallel=False,
        )
    materialize(model, device="cpu")
    initialize(model, seed=0, std_of=std_of)
    return model


def alone(architecture: str) -> dict[str, Any]:
    """Train transformers alone, without a stop."""
    return reference(drawn(architecture, overrides_of(architecture)))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    table(__file__, "resumed_on_another_layout"),
)
def test_resumed_on_another_layout(
    kind: str, before: dict[str, int], after: dict[str, int], pool: Pool, tmp_path: Path
) -> None:
    """The losses and weights are those of transformers alone, which never stopped."""
    architecture = families()[kind]
    [true] = pool.run(1, alone, architecture)
    fields = overrides_of(architecture)
    legs = (partial(train, steps=steps, folder=tmp_path) for steps in ((1,), (2, 3)))
    pool.run(2, next(legs), architecture, before, fields)
    true = true | {name: true[name][1:] for name in ("losses", "norms")}
    for found in pool.run(num_ranks(after), next(legs), architecture, after, fields):
        away = compare({**found, "gradients": {}}, true)
        assert max(away.values()) < BOUND, max(away.items(), key=lambda pair: pair[1])


# ---- generation and evaluation -------------------------------------------------------------------


def generate(architecture: str, prompts: list[list[int]], fields: dict[str, Any]) -> Any:
    """Return titan's greedy continuations."""
    model = drawn(architecture, fields).eval()
    return Generator(model=model, max_new_tokens=12).complete(prompts)


def their_greedy(architecture: str, prompts: list[list[int]], fields: dict[str, Any]) -> Any:
    """Return transformers' own greedy continuations, of each prompt alone."""
    twin = twin_with(drawn(architecture, fields)).eval()
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        made = twin.generate(
            tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3_text",
        "qwen3_moe",
        "phi3",
        "qwen3_next",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("granitemoehybrid", "lfm2")),
    ],
)
def test_greedy_text_is_transformers(kind: str, pool: Pool) -> None:
    """On one process and on two tensor-parallel ranks, for prompts of unequal length, of which one is longer than the window."""
    architecture = families()[kind]
    fields = overrides_of(architecture)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in (5, 21, 2)]
    [expected] = pool.run(1, their_greedy, architecture, prompts, fields)
    for ranks in (1, 2):
        for found in pool.run(ranks, generate, architecture, prompts, fields):
            assert found == expected


@pytest.mark.parametrize(
    "kind", ["gemma3_text", "qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def test_evaluation_is_transformers_cross_entropy(kind: str, tmp_path: Path) -> None:
    """`titan evaluate` on a folder that transformers saved. A target of n bytes costs n times the cross entropy."""
    architecture = families()[kind]
    fields = overrides_of(architecture) | {"vocab_size": 512}
    torch.manual_seed(0)
    twin = getattr(transformers, architecture)(_config_class(kind)(**fields)).eval()
    twin.set_attn_implementation("eager")
    twin.save_pretrained(tmp_path / "model")
    context, target = "The capital of France, a city on the Seine, is", " Paris."
    (tmp_path / "task.jsonl").write_text(json.dumps({"context": context, "target": target}))
    words = [str(tmp_path / "model"), "--tasks", str(tmp_path / "task.jsonl")]
    words += ["--tokenizer", "bytes", "--json", str(tmp_path / "found.json")]
    try:
        assert evaluate.main(words) == 0
    finally:
        torch.distributed.destroy_process_group()
    found = json.loads((tmp_path / "found.json").read_text())["task/log_likelihood"]
    begin = 256  # with which the tokenizer of bytes begins a text
    ids = torch.tensor([[begin, *(context + target).encode()]])
    with torch.no_grad():
        logits = twin(ids[:, :-1], use_cache=False).logits[0, -len(target) :]
    expected = F.cross_entropy(logits.float(), ids[0, -len(target) :], reduction="sum")
    assert found == pytest.approx(-expected.item(), rel=1e-5)


# ---- fields of config.json -----------------------------------------------------------------------


def sizes_of(architecture: str, **overrides: Any) -> Any:
    return ModelSection(
        name="transformers", architecture=architecture, overrides=overrides
    ).sizes


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_field_by_each_of_its_names(key: str) -> None:
    """The config class stores it under one of them."""
    sizes = sizes_of("Qwen3MoeForCausalLM", **{key: 16}, **SMALL)
    assert sizes.num_experts == 16


def test_tables_and_lists_in_overrides() -> None:
    """A table changes the keys that it names."""
    rope = {"full_attention": {"rope_theta": 5000.0}}
    kinds = ["full_attention", "sliding_attention"]
    sizes = sizes_of(
        "Gemma3ForCausalLM", rope_parameters=rope, layer_types=kinds, sliding_window=8, **SMALL
    )
    assert sizes.windows == (0, 8)
    found = sizes.facts["rope_parameters"]
    assert found["full_attention"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert found["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


_KINDS = {
    "num_experts": "Qwen3MoeForCausalLM",
    "num_nextn_predict_layers": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    table(__file__, "wrong_overrides"),
    ids=str,
)
def test_wrong_overrides(overrides: dict[str, Any], key: str, words: str) -> None:
    kind = next(
        (kind for name, kind in _KINDS.items() if name in overrides), "Qwen3ForCausalLM"
    )
    section = ModelSection(name="transformers", architecture=kind, overrides=SMALL | overrides)
    _, [(found, message)] = section.resolved
    assert found == key and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("more", "key", "words"),
    table(__file__, "refused_before_a_run"),
    ids=["load balance", "plan"],
)
def test_refused_before_a_run(more: dict[str, Any], key: str, words: str) -> None:
    """Also a model with experts, which refuses something else anyway."""
    architecture = families()["qwen3_moe"]
    plain = job_of(architecture, {}, overrides_of(architecture))
    more = more | {"model": plain.model.model_dump() | more.get("model", {})}
    config = job_of(architecture, {}, {}, more=more)
    with pytest.raises(ConfigError) as caught:
        check_to_run(config, world_size=2 if "parallelism" in more else 1)
    [problem] = caught.value.problems
    assert problem.key == key and words in problem.message


def test_a_document_mask_that_does_not_reach_attention_is_refused() -> None:
    """The value of a switch is True, which equals the 1 of a degree."""
    architecture = families()["olmo2"]
    config = job_of(architecture, {}, overrides_of(architecture), packed=True)
    sizes = dataclasses.replace(config.model.sizes, refuses=(("document_mask", "why"),))
    assert [*_check_plug_in(config, sizes, 1)] == [("data.document_mask", "why")]
