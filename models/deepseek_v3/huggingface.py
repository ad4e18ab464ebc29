"""DeepSeek in `transformers` (DeepseekV3ForCausalLM, DeepseekV2ForCausalLM): names, and config.json. Imports no torch.

A model with sigmoid scores is V3. Weights are not permuted: `rotate_pairs` in common/rotary.py pairs neighbours, as
transformers does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan.models.common import hf_names

from .config import DeepSeekConfig

ARCHITECTURES = {"DeepseekV3ForCausalLM": "deepseek_v3", "DeepseekV2ForCausalLM": "deepseek_v2"}

_BLOCK = {
    **hf_names.BLOCK,
    **hf_names.MOE_BLOCK,
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
_FIELDS: tuple[hf_names.Field, ...] = (
    *hf_names.FIELDS,
    hf_names.MTP,
    ("q_lora_rank", "q_lora_rank", 0),
    ("kv_lora_rank", "kv_lora_rank", ...),
    ("qk_nope_head_dim", "qk_nope_head_dim", ...),
    ("qk_rope_head_dim", "qk_rope_head_dim", ...),
    ("v_head_dim", "v_head_dim", ...),
    ("num_experts", "n_routed_experts", ...),
    ("top_k", "num_experts_per_tok", ...),
    ("expert_dim", "moe_intermediate_size", ...),
    ("num_shared_experts", "n_shared_experts", ...),
    ("n_dense_layers", "first_k_dense_replace", ...),
    ("normalize_weights", "norm_topk_prob", ...),
    ("route_scale", "routed_scaling_factor", ...),
    ("num_groups", "n_group", 0),
    ("top_groups", "topk_group", 0),
)
_YARN: tuple[hf_names.Field, ...] = (
    ("rope_factor", "factor", ...),
    ("rope_mscale", "mscale", ...),
    ("original_context", "original_max_position_embeddings", ...),
)
_YARN_ONLY = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}
# Settings of YaRN that released models leave at these defaults.
_YARN_DEFAULTS = {"truncate": True, "attention_factor": None}


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: DeepSeek has no parameter of this name.
    """
    return hf_names.hf_name(name, block=_BLOCK)


def hf_buffer(name: str, config: DeepSeekConfig) -> str | None:
    """Return the name of one of our buffers in transformers.

    Args:
        name: our name.
        config: the model's sizes.

    Returns:
        The name, or None if transformers has no such buffer. It has only the routing bias of V3.
    """
    layer, _, rest = name.removeprefix("layers.").partition(".")
    has_bias = rest.removeprefix("block.") == "moe.bias" and config.score == "sigmoid"
    return f"model.layers.{layer}.mlp.gate.e_score_correction_bias" if has_bias else None


def hf_copies(config: DeepSeekConfig) -> dict[str, str]:
    """Return tensors on disk that are copies of our parameters: modules of multi-token prediction repeat both embeddings."""
    output = "tok_embeddings.weight" if config.tied_embeddings else "output.weight"
    copied = {"embed_tokens": "tok_embeddings.weight", "shared_head.head": output}
    numbers = range(config.n_layers, config.num_blocks)
    return {f"model.layers.{n}.{name}.weight": o for n in numbers for name, o in copied.items()}


def hf_unused(hf: dict[str, Any], config: DeepSeekConfig) -> Iterator[str]:
    """Yield the prefix of the module of multi-token prediction that V3 has by default, if the model has none."""
    if "num_nextn_predict_layers" not in hf and config.score == "sigmoid":
        yield f"model.layers.{config.num_blocks}."


def hf_config(config: DeepSeekConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    is_v3, has_groups = config.score == "sigmoid", config.num_groups > 0
    if is_v3:
        architecture, method = "DeepseekV3ForCausalLM", "noaux_tc"
    else:
        architecture, method = "DeepseekV2ForCausalLM", "greedy"
        method = "group_limited_greedy" if has_groups else method
    yarn = {
        **_YARN_ONLY,
        **hf_names.fields_of(config, _YARN),
        "mscale_all_dim": config.rope_mscale,
    }
    return {
        **hf_names.header(ARCHITECTURES, architecture),
        **hf_names.hf_config(config),
        **hf_names.fields_of(config, _FIELDS),
        "q_lora_rank": config.q_lora_rank or None,
        # transformers writes "no groups" as one group, of which one is chosen.
        "n_group": config.num_groups or 1,
        "topk_group": config.top_groups or 1,
        "topk_method": method,
        "scoring_func": config.score,
        "moe_layer_freq": 1,
        "head_dim": config.qk_rope_head_dim,
        "rope_scaling": yarn if config.rope_factor else None,
        "max_position_embeddings": 163_840 if config.rope_factor else 4096,
    }


def read_config(hf: dict[str, Any]) -> DeepSeekConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe DeepSeek-V2 or V3.
    """
    is_v3 = "v3" in str(hf.get("model_type") or hf.get("architectures")).lower()
    score, normalizes = ("sigmoid", {}) if is_v3 else ("softmax", {"norm_topk_prob": False})
    only = {"scoring_func": score, "moe_layer_freq": 1, "rope_interleave": True, **normalizes}
    hf_names.require(hf, only)
    for other in ("num_experts", "num_local_experts"):
        hf = hf_names.renamed(hf, other, "n_routed_experts")
    hf = hf_names.completed(hf, "deepseek_v3" if is_v3 else "deepseek_v2")
    rope = hf_names.rope_of(hf)
    theta: hf_names.Field = ("rope_theta", "rope_theta", ...)
    hf = hf | {"rope_theta": rope["rope_theta"]}
    sizes = hf_names.read_fields(hf, DeepSeekConfig, (*_FIELDS, theta))
    sizes["rope_factor"] = 0.0
    if (kind := rope["rope_type"]) != "default":
        same = {**_YARN_ONLY, "mscale_all_dim": rope.get("mscale"), **_YARN_DEFAULTS}
        given = _YARN_DEFAULTS | _YARN_ONLY | rope
        if any(given.get(key, kind) != value for key, value in same.items()):
            raise ValueError(
                f"rope_scaling is {_YARN_ONLY | rope}; titan's model has YaRN with {same}"
            )
        sizes |= hf_names.read_fields(rope, DeepSeekConfig, _YARN)
    # transformers' V3 has one method, and does not read the key.
    if sizes["num_groups"] <= 1 or (not is_v3 and hf["topk_method"] == "greedy"):
        sizes |= {"num_groups": 0, "top_groups": 0}
    elif not is_v3:
        sizes["group_top_k"] = 1
    return DeepSeekConfig(**sizes, score=score)
