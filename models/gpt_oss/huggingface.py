"""gpt-oss in `transformers` (GptOssForCausalLM): names, and config.json. Imports no torch.

On disk experts are stacked as here, with their matrices transposed. w1 and w3 are one tensor there, whose last channels
alternate between the two. Published weights of experts are MXFP4, which titan.huggingface.load reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from titan.models.common import hf_names

from .config import GptOssConfig

ARCHITECTURES = {"GptOssForCausalLM": "gpt_oss"}

_BLOCK = {**hf_names.BLOCK, "moe.router.gate": "mlp.router"}
# Our name, transformers' name, and the channels on disk that are ours: first channel and stride.
_PARTS = {
    "moe.experts.w1": ("mlp.experts.gate_up_proj", (0, 2)),
    "moe.experts.w2": ("mlp.experts.down_proj", (0, 1)),
    "moe.experts.w3": ("mlp.experts.gate_up_proj", (1, 2)),
    "moe.experts.w1_bias": ("mlp.experts.gate_up_proj_bias", (0, 2)),
    "moe.experts.w2_bias": ("mlp.experts.down_proj_bias", (0, 1)),
    "moe.experts.w3_bias": ("mlp.experts.gate_up_proj_bias", (1, 2)),
}
_FIELDS: tuple[hf_names.Field, ...] = (
    ("num_experts", "num_local_experts", ...),
    ("top_k", "num_experts_per_tok", ...),
    ("expert_dim", "intermediate_size", ...),
    ("window", "sliding_window", ...),
    ("swiglu_limit", "swiglu_limit", ...),
)
_YARN: tuple[hf_names.Field, ...] = (
    ("rope_factor", "factor", ...),
    ("original_context", "original_max_position_embeddings", ...),
)
_YARN_ONLY = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_ONLY = {"attention_bias": True, "swiglu_alpha": 1.702}


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: gpt-oss has no parameter of this name.
    """
    layer, _, rest = name.removeprefix("layers.").partition(".")
    if rest == "attention.sinks.weight":
        return f"model.layers.{layer}.self_attn.sinks"
    if rest in _PARTS:
        return f"model.layers.{layer}.{_PARTS[rest][0]}"
    return hf_names.hf_name(name, block=_BLOCK)


def hf_part(name: str) -> tuple[int, int] | None:
    """Return which of the last channels of a stacked tensor on disk belong to one of our parameters.

    Returns:
        First channel and stride, or None if the tensor on disk is our parameter as it is.
    """
    return _PARTS.get(name.removeprefix("layers.").partition(".")[2], (None, None))[1]


def hf_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    yarn = {**_YARN_ONLY, **hf_names.fields_of(config, _YARN)}
    return {
        **hf_names.header(ARCHITECTURES, "GptOssForCausalLM"),
        **hf_names.hf_config(config),
        **hf_names.fields_of(config, _FIELDS),
        **_ONLY,
        "sliding_window": config.window or 128,
        "layer_types": _layer_types(config),
        "rope_scaling": yarn if config.rope_factor else {"rope_type": "default"},
        "max_position_embeddings": 131_072 if config.rope_factor else 4096,
    }


def read_config(hf: dict[str, Any]) -> GptOssConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe gpt-oss.
    """
    hf = hf_names.renamed(hf, "num_experts", "num_local_experts")
    hf = hf_names.completed({k: v for k, v in hf.items() if v is not None}, "gpt_oss")
    rope = hf_names.rope_of(hf)
    flat = {"rope_theta": rope["rope_theta"], "rope_parameters": None, "rope_scaling": None}
    config = hf_names.read_sizes(
        hf | flat,
        GptOssConfig,
        of="gpt_oss",
        fields=_FIELDS,
        only=_ONLY,
        quantized=("mxfp4", None),
    )
    if rope["rope_type"] != "default":
        same = {"truncate": True} | rope
        if rope.get("attention_factor") or any(
            same.get(k, v) != v for k, v in _YARN_ONLY.items()
        ):
            raise ValueError(
                f"rope_scaling is {rope}; titan's model has YaRN with {_YARN_ONLY}"
            )
        config = replace(config, **hf_names.read_fields(rope, GptOssConfig, _YARN))
    types = hf.get("layer_types")
    if types and set(types) == {"full_attention"}:
        config = replace(config, window=0)
    # The length first, so that a huge num_hidden_layers makes no huge list.
    if types and (len(types) != config.n_layers or types != _layer_types(config)):
        raise ValueError(
            "layer_types: titan's model has windows in every second layer, from the first on"
        )
    return config


def _layer_types(config: GptOssConfig) -> list[str]:
    has_window = (config.window_of(layer) > 0 for layer in range(config.n_layers))
    return ["sliding_attention" if window else "full_attention" for window in has_window]
