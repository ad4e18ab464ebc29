"""config.json in the spellings that people have: the logits of transformers, or one line that refuses.

Each case is a folder of random weights that transformers saves, with a config.json that differs in a few keys. transformers
and titan read that folder. The slow lane crosses all families with all changes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tables import TABLES as ROWS
from titan.checkpoint import CheckpointError
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.state import model_state
from titan.config.model import family
from titan.huggingface import load as huggingface
from titan.huggingface.hf_model import HFModel
from titan.parallel import materialize

Table = dict[str, Any]
SIZES: Table = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LATENT: Table = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_experts_per_tok": 2}
# The architecture, its type, and its smallest config.json.
FAMILIES: dict[str, tuple[str, str, Table]] = {
    "llama": ("Llama", "llama", SIZES),
    "qwen3": ("Qwen3", "qwen3", SIZES | {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        "qwen3_moe",
        SIZES | EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "mistral": ("Mistral", "mistral", SIZES | {"sliding_window": None}),
    "gpt_oss": (
        "GptOss",
        "gpt_oss",
        SIZES | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 16},
    ),
    "gemma3": (
        "Gemma3",
        "gemma3_text",
        SIZES | {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    ),
    "deepseek_v3": ("DeepseekV3", "deepseek_v3", LATENT | {"norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", "deepseek_v2", LATENT | {"norm_topk_prob": False}),
}
ABSENT = ...
LLAMA3: Table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN: Table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TABLES: dict[str, Table] = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, mscale": YARN
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, no truncation": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def rope_changes() -> dict[str, Table]:
    """Return each table in each place and spelling."""
    changes: dict[str, Table] = {}
    default: Table = {"rope_type": "default"}
    for name, table in TABLES.items():
        old = {"type" if key == "rope_type" else key: value for key, value in table.items()}
        within = {**table, "rope_theta": 5e3}
        bare = {k: v for k, v in table.items() if k != "original_max_position_embeddings"}
        changes |= {
            f"{name}: rope_parameters": {"rope_parameters": table},
            f"{name}: rope_scaling": {"rope_scaling": table},
            f"{name}: type": {"rope_scaling": old},
            f"{name}: by hand": {
                "rope_parameters": default | {"rope_theta": 5e3},
                "rope_scaling": table,
            },
            f"{name}: undone": {"rope_parameters": within, "rope_scaling": default},
            f"{name}: theta within": {"rope_parameters": within},
            f"{name}: theta beside": {"rope_parameters": table, "rope_theta": 5e3},
            f"{name}: both thetas": {"rope_parameters": within, "rope_theta": 2e5},
            f"{name}: both thetas, old": {"rope_scaling": within, "rope_theta": 2e5},
            f"{name}: length beside": {
                "rope_scaling": bare,
                "original_max_position_embeddings": 32,
            },
            f"{name}: two lengths": {
                "rope_scaling": table,
                "original_max_position_embeddings": 32,
            },
            f"{name}: no length": {"rope_scaling": bare},
            f"{name}: partial": {"rope_scaling": table | {"partial_rotary_factor": 0.5}},
            f"{name}: attention factor": {"rope_scaling": table | {"attention_factor": 1.5}},
        }
    return changes


def by_kind(wide: Table, local: Table) -> Table:
    return {"full_attention": wide, "sliding_attention": local}


CHANGES: dict[str, Table] = {
    "nothing": {},
    **rope_changes(),
    "no theta": {"rope_theta": None},
    "whole theta": {"rope_theta": 50_000},
    "null tables": {"rope_scaling": None, "rope_parameters": None},
    "empty tables": {"rope_scaling": {}, "rope_parameters": {}},
    "partial": {"partial_rotary_factor": 0.5},
    **{f"kv heads {n}": {"num_key_value_heads": n} for n in (None, ABSENT, 1, 4)},
    # The scale goes with the default: else products are so large that fp32 rotations differ by 1e-4 in the logits.
    **{f"head_dim {n}": {"head_dim": n, "query_pre_attn_scalar": 256} for n in (None, ABSENT)},
    "head_dim 16": {"head_dim": 16},
    **{f"bias {value}": {"attention_bias": value} for value in (True, None)},
    "mlp bias": {"mlp_bias": True},
    **{f"tied {value}": {"tie_word_embeddings": value} for value in (True, False, None)},
    "gelu": {"hidden_act": "gelu"},
    "gelu, Gemma's key": {"hidden_activation": "gelu"},
    **{f"window {n}": {"sliding_window": n} for n in (16, None, ABSENT, 0)},
    "window of some": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "window of all": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    "all full": {"layer_types": ["full_attention"] * 3},
    "all sliding": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 16},
    "mixed": {
        "layer_types": ["sliding_attention", *["full_attention"] * 2],
        "sliding_window": 16,
    },
    "alternating": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
    **{f"eps {value}": {"rms_norm_eps": value} for value in (ABSENT, 1e-2)},
    "dropout": {"attention_dropout": 0.5},
    "pretraining_tp": {"pretraining_tp": 2},
    "float16": {"torch_dtype": "float16"},
    **{
        f"weights normalized {value}": {"norm_topk_prob": value}
        for value in (True, False, ABSENT)
    },
    **{f"clipped at {value}": {"clip_qkv": value} for value in (0.5, 0)},
    "soft cap": {"final_logit_softcapping": 5.0},
    "soft cap of attention": {"attn_logit_softcapping": 5.0},
    "experts in every second": {"decoder_sparse_step": 2},
    "a dense block": {"mlp_only_layers": [1]},
    "swiglu_limit": {"swiglu_limit": 3.0},
    "swiglu_alpha": {"swiglu_alpha": 1.0},
    "one expert": {"num_experts_per_tok": 1},
    "pattern": {"sliding_window_pattern": 2},
    "_pattern": {"_sliding_window_pattern": 2},
    "scalar": {"query_pre_attn_scalar": 64},
    "local theta": {"rope_local_base_freq": 500.0},
    "both ways": {"use_bidirectional_attention": True},
    "nested": {
        "rope_parameters": by_kind(
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            {"rope_type": "default", "rope_theta": 1e4},
        )
    },
    "nested, thetas beside": {
        "rope_parameters": by_kind(
            {"rope_type": "default", "rope_theta": 5e3},
            {"rope_type": "default", "rope_theta": 3e2},
        ),
        "rope_theta": 7e4,
        "rope_local_base_freq": 70.0,
    },
    "nested, local scaled": {
        "rope_parameters": by_kind({"rope_type": "default"}, TABLES["linear"])
    },
    "nested, by hand": {
        "rope_parameters": by_kind({"rope_type": "default", "rope_theta": 5e3}, {}),
        "rope_scaling": TABLES["linear"],
    },
    "groups": {"n_group": 2, "topk_group": 1},
    "scale of routes": {"routed_scaling_factor": 2.5},
    **{f"scores {name}": {"scoring_func": name} for name in ("softmax", "sigmoid")},
    "not interleaved": {"rope_interleave": False},
    **{f"dense blocks {n}": {"first_k_dense_replace": n} for n in (0, 3)},
    "low-rank queries": {"q_lora_rank": 16},
    "two shared experts": {"n_shared_experts": 2},
    "no shared experts": {"n_shared_experts": None},
    "topk_method noaux_tc": {"topk_method": "noaux_tc"},
    "groups of greedy": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "unknown key": {"frobnicate": 3},
}
# Of each family, what its folders are known to come with, for the default lane.
DEFAULT: dict[str, tuple[str, ...]] = ROWS["test_config_variants.default"]


def logits(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor | str, torch.Tensor | str]:
    """Return transformers' logits and titan's for a folder. A text is the reason of the one that refuses it.

    In fp64, since rounding in fp32 is up to 2e-5 for some of these random models.
    """
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    try:
        model = auto.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            is_scale = weight.ndim == 1 and "norm" in name
            weight.data = (
                torch.rand_like(weight) * 0.5 + 0.5
                if is_scale
                else torch.randn_like(weight) * 0.15
            )
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        theirs = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            expected = theirs.eval().double()(tokens).logits
    except Exception as error:  # its checks raise many kinds
        expected = f"{type(error).__name__}: {error}"
    try:
        name, sizes = huggingface.read_sizes(huggingface.open_folder(folder))
        with torch.device("meta"):
            ours = family(name).build_model(sizes).eval()
        materialize(ours, device="cpu")
        model = HFModel.of(name, sizes)
        huggingface.load(folder, model_state([ours]), model=model, group=CheckpointGroup())
    except CheckpointError as error:
        return expected, str(error)
    with torch.no_grad():
        return expected, ours.double()(tokens)


def compare(name: str, change: str, folder: Path) -> bool:
    """Return whether titan takes a folder, and with transformers' logits. False: one line refuses it."""
    architecture, model_type, sizes = FAMILIES[name]
    header = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    config = {
        k: v for k, v in {**header, **sizes, **CHANGES[change]}.items() if v is not ABSENT
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(64, (2, 60), generator=torch.Generator().manual_seed(1))
    expected, found = logits(folder, tokens)
    if isinstance(found, str):
        assert "\n" not in found and str(folder) in found
        return False
    # Where transformers refuses its own folder, there is no right answer.
    if not isinstance(expected, str):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize(("name", "change"), [(n, c) for n, of in DEFAULT.items() for c in of])
def test_logits_equal_transformers_or_are_refused(
    name: str, change: str, tmp_path: Path
) -> None:
    compare(name, change, tmp_path)


def test_a_tied_folder_with_another_output_layer_is_refused(tmp_path: Path) -> None:
    """transformers takes the tensor that is there, whatever the key says."""
    safetensors = pytest.importorskip("safetensors.torch")
    assert compare("llama", "tied False", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    _, sizes = huggingface.read_sizes(huggingface.open_folder(tmp_path))
    message = (
        "tensor lm_head.weight differs from model.embed_tokens.weight, and tie_word_embeddings"
    )
    with pytest.raises(CheckpointError, match=message):
        huggingface.check_folder(tmp_path, HFModel.of("llama3", sizes))
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    huggingface.check_folder(tmp_path, HFModel.of("llama3", sizes))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "hidden_size"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "8", [8], None])
def test_a_value_that_no_model_has_is_refused_in_a_line(
    tmp_path: Path, key: str, value: object
) -> None:
    header = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(header | SIZES | {key: value}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    try:
        huggingface.read_sizes(huggingface.open_folder(tmp_path))
        assert value is None and key != "hidden_size"  # null: the default
    except CheckpointError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_changes(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    wrong, taken = [], 0
    for change in CHANGES:
        for file in tmp_path.iterdir():
            file.unlink()
        try:
            taken += compare(name, change, tmp_path)
        except AssertionError as error:
            wrong.append(f"{change}: {str(error).splitlines()[0]}")
    assert not wrong
    # Not all are refused.
    assert taken > 40
