"""Folders of transformers' own with unusual contents, against transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.hf_families import (
    BOUND,
    compare,
    families,
    overrides_of,
    part_of,
    reference,
    std_of,
    train,
)
from tests.support.hf_folders import save_twin
from tests.support.ranks import Pool
from titan.checks.layout_rules import check_layout
from titan.config.schema import JobConfig, ModelSection
from titan.contrib.transformers import build_model
from titan.huggingface import convert
from titan.parallel import initialize, materialize

LONG_ROPE = {
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 40,
    },
}


def resolved(**keys: Any) -> Any:
    sizes, problems = ModelSection(name="transformers", **keys).resolved
    assert not problems, problems
    return sizes


def built(sizes: Any) -> Any:
    with torch.device("meta"):
        model = build_model(sizes)
    materialize(model, device="cpu")
    return model


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("phi3", LONG_ROPE),
        # A mask for a window of 0 tokens is made, which no layer uses.
        ("qwen2_moe", {"use_sliding_window": False}),
        ("qwen2_moe", {"sliding_window": None}),
    ],
    ids=["longrope", "no window", "window null"],
)
@pytest.mark.parametrize("length", [32, 48])
def test_logits_are_transformers(
    kind: str, fields: dict[str, Any], length: int, tmp_path: Path
) -> None:
    architecture = families()[kind]
    save_twin(architecture, overrides_of(architecture) | fields, tmp_path)
    model = built(resolved(hf_path=str(tmp_path)))
    twin = getattr(transformers, architecture).from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    theirs = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(model, name, theirs))
        tokens = torch.randint(128, (2, length))
        expected = twin(tokens, use_cache=False).logits
        difference = (model(tokens) - expected).norm() / expected.norm()
    assert difference < BOUND


def test_rotary_frequencies_that_ranks_would_choose_differently_are_refused() -> None:
    fields = overrides_of("Phi3ForCausalLM") | LONG_ROPE
    refuses = dict(resolved(architecture="Phi3ForCausalLM", overrides=fields).refuses)
    assert {"context_parallel_degree", "reset_positions"} == refuses.keys()
    section = ModelSection(
        name="transformers",
        architecture="LlamaForCausalLM",
        overrides={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    )
    [(_, message)] = section.resolved[1]
    assert "rope_type dynamic" in message


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_more_positions_than_a_table_has_are_refused(kind: str) -> None:
    architecture = families()[kind]
    model = {"name": "transformers", "architecture": architecture}
    model |= {"overrides": overrides_of(architecture) | {"max_position_embeddings": 100}}
    for length, count in ((100, 0), (128, 1)):
        job = JobConfig.model_validate({"model": model, "training": {"seq_len": length}})
        found = [p for p in check_layout(job, world_size=1) if "at most 100" in p.message]
        assert [p.key for p in found] == ["training.seq_len"] * count


@pytest.mark.parametrize(
    ("kind", "fields"), [("opt", {}), ("phi3", LONG_ROPE)], ids=["table", "longrope"]
)
def test_a_table_of_positions_keeps_its_length(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The default job's sequences are longer, and transformers builds what config.json says."""
    architecture, back = families()[kind], tmp_path / "back"
    source = tmp_path / "source"
    save_twin(architecture, overrides_of(architecture) | fields | {"vocab_size": 300}, source)
    assert convert.main(["from-hf", str(source), str(tmp_path / "run")]) == 0
    assert convert.main(["to-hf", str(tmp_path / "run"), str(back)]) == 0
    tokens, load = torch.arange(60)[None], getattr(transformers, architecture).from_pretrained
    with torch.no_grad():
        before, after = (load(f, dtype=torch.float32)(tokens).logits for f in (source, back))
    assert torch.equal(before, after)


def test_weights_in_8_bits_come_back_without_the_word_of_it(tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    fields = overrides_of("Qwen2ForCausalLM") | {"vocab_size": 300}
    save_twin("Qwen2ForCausalLM", fields, source)
    file, stored, expected = source / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        if name.endswith("proj.weight"):
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full((1, 1), 2.0)
            expected[name] = 2 * stored[name].float()
        else:
            stored[name] = expected[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(content))
    assert convert.main(["from-hf", str(source), str(tmp_path / "run")]) == 0
    assert convert.main(["to-hf", str(tmp_path / "run"), str(back)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    found = model.state_dict()
    assert "lm_head.weight" in expected
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"layers.*.mlp.dwn_proj": "rowwise"}, "did you mean 'layers.*.mlp.down_proj'"),
        ({"layers.*.mlp.down_proj": "rowise"}, "did you mean 'rowwise'"),
    ],
    ids=["module", "style"],
)
def test_a_plan_with_a_mistake_is_refused_without_tensor_parallelism(
    plan: dict[str, str], words: str
) -> None:
    fields = overrides_of("LlamaForCausalLM")
    keys = {"architecture": "LlamaForCausalLM", "overrides": fields}
    [(key, message)] = ModelSection(name="transformers", plan=plan, **keys).resolved[1]
    assert key == f"model.plan.{next(iter(plan))}" and words in message
    # A small model of `titan certify` may lack the block.
    plan = {"layers.30.mlp.down_proj": "rowwise"}
    assert not ModelSection(name="transformers", plan=plan, **keys).resolved[1]


def trained(fields: dict[str, Any], degrees: dict[str, int]) -> dict[str, float]:
    """Return the largest differences of a layout from transformers alone."""
    architecture = "LlamaForCausalLM"
    fields = overrides_of(architecture) | fields
    found = train(architecture, degrees, fields)
    model = built(resolved(architecture=architecture, overrides=fields))
    initialize(model, seed=0, std_of=std_of)
    return compare(found, reference(model))


@pytest.mark.parametrize("pad", [5, 70])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 2}], ids=["TP+SP", "FSDP2"])
def test_the_token_of_padding_gets_no_gradient(
    pad: int, degrees: dict[str, int], pool: Pool
) -> None:
    """It is among the tokens, in the first rank's rows of the embedding or in the second's."""
    for found in pool.run(2, trained, {"pad_token_id": pad}, degrees):
        assert max(found.values()) < BOUND, found
