"""Names of a decoder like Llama in `transformers`: its parameters, and the fields of config.json. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from .config import LlamaConfig, RopeScaling

_Config = TypeVar("_Config", bound=LlamaConfig)

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    # Modules of multi-token prediction, as in DeepSeek-V3's folder.
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "head_norm": "shared_head.norm",
}
# For families whose blocks have experts. On disk each expert is a tensor; {} is its number.
MOE_BLOCK = {
    "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj",
    "moe.experts.w3": "mlp.experts.{}.up_proj",
}
# Our field, theirs, and the value that null stands for; ... if null is an error.
Field = tuple[str, str, Any]
FIELDS: tuple[Field, ...] = (
    ("dim", "hidden_size", ...),
    ("n_layers", "num_hidden_layers", ...),
    ("n_heads", "num_attention_heads", ...),
    ("ffn_dim", "intermediate_size", ...),
    ("vocab_size", "vocab_size", ...),
    ("norm_eps", "rms_norm_eps", ...),
    ("tied_embeddings", "tie_word_embeddings", False),
)
MTP: Field = ("num_mtp_modules", "num_nextn_predict_layers", 0)
# quant_method and weight_block_size of the one quantization that is read by default.
FP8: tuple[str, Any] = ("fp8", [128, 128])
# Settings of which this model supports one value only, though transformers supports more.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}

_RUNS_OTHERS = 'model.name = "transformers" with model.hf_path runs it'


def hf_name(name: str, *, block: dict[str, str] = BLOCK) -> str:
    """Return the name of one of our parameters in transformers.

    Args:
        name: our name. A parameter that stacks experts gets a name with {} for the expert's number.
        block: names within a block. A family adds its own to `BLOCK`.

    Raises:
        KeyError: The family has no parameter of this name.
    """
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(?:block\.)?(.+?)(\.weight|\.bias)?", name)
    if match is None:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{block[match[2]]}{match[3] or '.weight'}"


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of these sizes without its header, in the spelling that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    rope = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    return {
        **fields_of(config, (*FIELDS, MTP) if config.num_mtp_modules else FIELDS),
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 131_072 if scaling else 8192,  # as Llama 3.1 and 3 have it
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "initializer_range": config.init_std,
        **{key: _ONLY[key] for key in ("hidden_act", "attention_bias")},
    }


def header(architectures: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the fields of config.json that name the model's class and type.

    Args:
        architectures: transformers' classes, and the model_type of each.
        name: the class to write.
    """
    return {"architectures": [name], "model_type": architectures[name]}


def fields_of(config: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the values of fields under transformers' names.

    Args:
        config: a family's sizes.
        fields: our name, transformers' name and the default of each field.
    """
    return {theirs: getattr(config, ours) for ours, theirs, _ in fields}


def read_sizes(
    hf: dict[str, Any],
    kind: type[_Config],
    *,
    of: str,
    fields: Iterable[Field] = (),
    only: Mapping[str, Any] = {},
    quantized: tuple[str, Any] = FP8,
) -> _Config:
    """Read a family's config dataclass from config.json.

    Args:
        hf: content of config.json.
        kind: the family's config class.
        of: the model_type, whose class in transformers has values for keys that are left out.
        fields: fields of the family, in addition to `FIELDS`.
        only: settings of which this model supports one value: that value.
        quantized: see `require`.

    Raises:
        ValueError: The file is invalid, or describes a model that the family does not have.
    """
    require(hf, only, quantized=quantized)
    hf = completed(hf, of)
    rope = rope_of(hf)
    hf = hf | {"rope_theta": rope["rope_theta"]}
    fields = (
        *FIELDS,
        *fields,
        *([MTP] if hf.get(MTP[1]) else []),
        ("n_kv_heads", "num_key_value_heads", hf["num_attention_heads"]),
        ("head_dim", "head_dim", 0),
        ("rope_theta", "rope_theta", ...),
    )
    sizes = read_fields(hf, kind, fields)
    if sizes["dim"] % sizes["n_heads"] and not sizes["head_dim"]:
        raise ValueError(
            "num_attention_heads does not divide hidden_size, and head_dim is missing"
        )
    heads, kv_heads = sizes["n_heads"], sizes["n_kv_heads"]
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    return kind(**sizes, rope_factor=_rope_factor(rope))


def completed(hf: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return a config.json with the values of transformers' (or diffusers') class for keys that are left out.

    hf_defaults.json has these values.
    """
    defaults = json.loads(
        Path(__file__).with_name("hf_defaults.json").read_text(encoding="utf-8")
    )
    return defaults[model_type] | hf


def renamed(hf: dict[str, Any], other: str, key: str) -> dict[str, Any]:
    """Return a config.json with a value under `key` that it has only under transformers' other name of the key."""
    return hf | {key: hf[other]} if other in hf and key not in hf else hf


def require(
    hf: dict[str, Any], only: Mapping[str, Any], *, quantized: tuple[str, Any] = FP8
) -> None:
    """Check that titan's model has every setting of a config.json.

    Args:
        hf: content of config.json.
        only: settings of which the family supports one value: that value.
        quantized: quant_method and weight_block_size of the one quantization that published weights of the family have.

    Raises:
        ValueError: A setting has a value that titan's model does not support.
    """
    for key, value in {**_ONLY, **only}.items():
        if hf.get(key) not in (None, value):
            raise ValueError(
                f"{key} is {hf[key]!r}; titan's model has {value!r} and nothing else; {_RUNS_OTHERS}"
            )
    # Llama's class in transformers does not read the types, and Qwen3's drops the window without use_sliding_window.
    has_window = hf.get("sliding_window") and not str(hf.get("model_type")).startswith("qwen3")
    if "sliding_attention" in (hf.get("layer_types") or ()) and not has_window:
        raise ValueError("layer_types has sliding layers, and no window is set for them")
    found = hf.get("quantization_config")
    if found and (found.get("quant_method"), found.get("weight_block_size")) != quantized:
        form = (
            "fp8 in blocks of 128 x 128"
            if quantized == FP8
            else f"{quantized[0]} in this family"
        )
        raise ValueError(f"quantization_config is {found}; titan reads {form} and no other")


def rope_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding with rope_type and rope_theta, as transformers 5 reads them.

    transformers 4 writes the key `rope_scaling`, which takes precedence over `rope_parameters`, since people add it to a
    folder by hand. A theta inside the table takes precedence over a top-level theta. For the original context length the
    top-level key takes precedence.

    Args:
        hf: content of config.json, completed.

    Raises:
        ValueError: rope_scaling is not a table.
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError("rope_scaling is not a table")
    kind = rope.get("rope_type", rope.get("type", "default"))
    # YaRN's and Llama 3.1's context before it was extended.
    length = rope.get("original_max_position_embeddings", hf.get("max_position_embeddings"))
    settings = {
        "rope_theta": rope.get("rope_theta", hf["rope_theta"]),
        "original_max_position_embeddings": hf.get("original_max_position_embeddings", length),
    }
    return {"rope_type": kind} | rope | settings


def read_fields(hf: dict[str, Any], kind: type, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the values of fields under our names.

    Args:
        hf: content of config.json.
        kind: config dataclass, whose annotations give the types.
        fields: our name, transformers' name and the default of each field.

    Raises:
        ValueError: A field is missing, has another type, or is out of range.
    """
    sizes, types = {}, get_type_hints(kind)
    for ours, theirs, default in fields:
        value = hf.get(theirs, default)
        value = default if value is None else value  # "head_dim": null
        if value is ...:
            raise ValueError(f"{theirs} is missing")
        wanted = types[ours]
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"{theirs} is {value!r}, which is not a valid {wanted.__name__}")
        # head_dim 0: derived.
        if not (0 if wanted is bool or default == 0 else 1e-12) <= value <= 2**31:  # nor NaN
            raise ValueError(f"{theirs} is {value}, which no model has")
        sizes[ours] = wanted(value)
    return sizes


def _rope_factor(rope: dict[str, Any]) -> float:
    """Return `LlamaConfig.rope_factor` for a rope_scaling (transformers 4) or rope_parameters (5)."""
    if rope["rope_type"] == "default":
        return 0.0
    try:
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    except (KeyError, TypeError, ValueError):
        scaling = None
    # Only the factor may differ from Llama 3.1's scaling.
    if (
        rope["rope_type"] != "llama3"
        or scaling is None
        or scaling != RopeScaling(factor=scaling.factor)
    ):
        raise ValueError(
            f"rope_scaling is {rope}; titan's model has Llama 3.1's and no other: {RopeScaling(factor=8.0)}, "
            f"with any factor; {_RUNS_OTHERS}"
        )
    return scaling.factor
