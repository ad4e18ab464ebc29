"""Models of transformers from a job file: layouts against transformers alone, folders, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.checkpoint.test_huggingface import through_titan_job
from tests.support.hf_families import LAYOUTS, PACKED, families, overrides_of, row_of
from tests.support.ranks import Pool
from titan.config.errors import ConfigError
from titan.config.model import model_config, resolve_model
from titan.config.schema import ModelSection
from titan.models.transformers.attention import spec_of
from titan.models.transformers.errors import UnsupportedModelError

# Fused matrices; norms over all heads; latent attention with experts; scaled embeddings, norms on both sides and windows; parallel
# attention and feed-forward with logits that are scaled; experts whose router has groups and a shared expert.
SIX = ("phi3", "olmo2", "deepseek_v3", "gemma3_text", "cohere2", "glm4_moe")


@pytest.mark.parametrize("kind", SIX)
def test_layouts_equal_transformers_alone(kind: str, pool: Pool) -> None:
    row = row_of(pool, kind, LAYOUTS)
    names = [name for name in LAYOUTS if name != "EP" or row["experts"]]
    assert {name: row[name] for name in names} == {name: row[name][:7] for name in names}, row
    assert all(float(row[name]) < 1e-5 for name in names)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_documents_do_not_see_each_other(kind: str, pool: Pool) -> None:
    """transformers alone makes the mask from the positions, for all layers and for those with a window."""
    row = row_of(pool, kind, PACKED)
    assert all(float(row[name]) < 1e-5 for name in PACKED), row


def section(**keys: Any) -> ModelSection:
    return ModelSection(name="transformers", **keys)


def saved(folder: Path, kind: str) -> Path:
    """A folder of transformers' own with a small model."""
    architecture = families()[kind]
    config: Any = getattr(transformers, architecture).config_class(**overrides_of(architecture))
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    for key, value in model.named_parameters():
        if "norm" in key:
            torch.nn.init.uniform_(value, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["phi3", "glm4_moe", "gemma3_text"])
def test_folders_there_and_back_bit_for_bit(kind: str, pool: Pool, tmp_path: Path) -> None:
    """Read on FSDP2 x TP, saved as a checkpoint, loaded, exported."""
    source = saved(tmp_path / "source", kind)
    model = {"name": "transformers", "hf_path": str(source), "overrides": {}}
    degrees = {"dp_shard": 2, "tp": 2}
    results = pool.run(4, through_titan_job, model, source, degrees, tmp_path)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    before = load_file(source / "model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in before.items())
    for read, held, _ in results:
        assert read == held  # its own part, once


def test_sizes_are_the_models() -> None:
    """With the numbers that transformers and the papers give."""
    llama = model_config(
        section(
            architecture="LlamaForCausalLM",
            overrides={
                **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
                **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
            },
        )
    )
    assert llama.num_params == 8_030_261_248
    assert (llama.n_heads, llama.n_kv_heads, llama.head_dim) == (32, 8, 128)
    from titan.models.llama3 import FLAVORS

    assert llama.flops_per_token(8192) == FLAVORS["8B"].flops_per_token(8192)
    mixtral = model_config(section(architecture="MixtralForCausalLM"))
    assert mixtral.num_params == 46_702_792_704
    assert mixtral.num_active_params == 12_879_925_248


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({}, "model.hf_path", "needs model.hf_path"),
        (
            {"architecture": "Qwen3ForCausalM"},
            "model.architecture",
            "did you mean Qwen3ForCausalLM",
        ),
        ({"architecture": "BartForCausalLM"}, "model.architecture", "an encoder with a decoder"),
        ({"architecture": "BloomForCausalLM"}, "model.architecture", "layers.0 (BloomBlock)"),
        ({"architecture": "MambaForCausalLM"}, "model.architecture", "layers.0 (MambaBlock)"),
        ({"architecture": "GPT2LMHeadModel"}, "model.architecture", "attention dropout"),
        (
            {"architecture": "LlamaForCausalLM", "overrides": {"hidden_sizes": 64}},
            "model.overrides.hidden_sizes",
            "did you mean hidden_size",
        ),
        ({"hf_path": "nowhere"}, "model.hf_path", "there is no"),
        ({"architecture": "LlamaModel"}, "model.architecture", "has no output layer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes(keys: dict[str, Any], key: str, words: str) -> None:
    _, problems = resolve_model(section(**keys))
    [(found, message)] = problems
    assert found == key and words in message and "\n" not in message


def test_code_of_a_folder_runs_only_if_asked_for(tmp_path: Path) -> None:
    content = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    _, [(_, message)] = resolve_model(section(hf_path=str(tmp_path)))
    assert "trust_remote_code" in message
    with pytest.raises(SystemExit, match="ran"):
        resolve_model(section(hf_path=str(tmp_path), trust_remote_code=True))


def test_code_of_a_folder_that_needs_another_package(tmp_path: Path) -> None:
    content = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text("import no_such_package\n")
    _, [(key, message)] = resolve_model(section(hf_path=str(tmp_path), trust_remote_code=True))
    assert key == "model.hf_path"
    assert "no_such_package" in message and "\n" not in message


def test_a_version_outside_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = sys.modules["titan.models.transformers.resolve"]
    monkeypatch.setattr(resolver, "OLDEST", (6, 0))
    _, [(_, message)] = resolve_model(section(architecture="Olmo2ForCausalLM"))
    assert transformers.__version__ in message and "6.0" in message


def test_masks_are_read_from_transformers_functions() -> None:
    from transformers import masking_utils as masks

    assert spec_of(masks.causal_mask_function) == (True, 0)
    assert spec_of(masks.bidirectional_mask_function) == (False, 0)
    for window in (1, 2, 7, 4096):
        assert spec_of(masks.sliding_window_causal_mask_function(window)) == (True, window)
    with pytest.raises(UnsupportedModelError, match="chunks"):
        spec_of(masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)))


def test_a_style_of_the_job_comes_first() -> None:
    name = "layers.*.mlp"
    job = section(architecture="LlamaForCausalLM", overrides={"num_hidden_layers": 1})
    with torch.device("meta"):
        from titan.models.transformers import build_model

        derived = build_model(model_config(job)).tensor_plan
        given = build_model(model_config(job.model_copy(update={"plan": {name: "whole"}})))
    assert derived[name] == "gather_input" and given.tensor_plan[name] == "whole"


def test_a_job_without_torch_is_told_its_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architecture"):
        model_config(section(architecture="Nothing"))
