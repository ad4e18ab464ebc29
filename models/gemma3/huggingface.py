"""Text models of Gemma 3 in `transformers` (Gemma3ForCausalLM): names, and config.json. Imports no torch.

Tensors are the same, since norms multiply by 1 + weight in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..common import hf_names
from .config import Gemma3Config

ARCHITECTURES = {"Gemma3ForCausalLM": "gemma3_text"}

_BLOCK = {
    **hf_names.BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_FIELDS: tuple[hf_names.Field, ...] = (
    ("vocab_size", "vocab_size", 262_208),
    ("tied_embeddings", "tie_word_embeddings", True),
    ("window", "sliding_window", 0),
    ("global_every", "sliding_window_pattern", 6),
    ("rope_local_theta", "rope_local_base_freq", 10_000.0),
    ("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
)
# Gemma 2's soft caps are in no published model of Gemma 3.
_ONLY: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: Gemma 3 has no parameter of this name.
    """
    return hf_names.hf_name(name, block=_BLOCK)


def hf_config(config: Gemma3Config) -> dict[str, Any]:
    """Return the config.json of these sizes, in the spelling that transformers 4 and 5 both read."""
    written = {**hf_names.header(ARCHITECTURES, "Gemma3ForCausalLM"), **hf_names.hf_config(config)}
    del written["hidden_act"]
    factor = config.rope_factor
    return {
        **written,
        **hf_names.fields_of(config, _FIELDS),
        **_ONLY,
        "rope_scaling": {"rope_type": "linear", "factor": factor} if factor else None,
        "layer_types": _layer_types(config),
        "max_position_embeddings": 131_072 if factor else 32_768,
    }


def read_config(hf: dict[str, Any]) -> Gemma3Config:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Gemma 3.
    """
    wide, local = _rope_tables(hf)
    types = hf.get("layer_types")
    is_global = [kind == "full_attention" for kind in types or ()]
    flat = {
        **hf,
        "rope_theta": wide["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "sliding_window": hf.get("sliding_window", 4096) or 0,  # null: no window
        "rope_parameters": None,
        "rope_scaling": None,
    }
    if True in is_global:
        flat["sliding_window_pattern"] = is_global.index(True) + 1
    elif types:  # too few layers for a global one
        flat.setdefault("sliding_window_pattern", hf.get("_sliding_window_pattern", 6))
    sizes = hf_names.read_sizes(
        flat, Gemma3Config, n_kv_heads=4, head_dim=256, fields=_FIELDS, only=_ONLY
    )
    if local["rope_type"] != "default":
        raise ValueError(
            f"the rope_type of local layers is {local['rope_type']}; titan's is default"
        )
    config = replace(sizes, rope_factor=_rope_factor(wide))
    if types and types != _layer_types(config):
        raise ValueError(
            f"layer_types is {types}; titan's model has a global layer at equal distances"
        )
    return config


def _rope_tables(hf: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary tables of global and local layers. transformers 5 writes both, 4 the global one as rope_scaling."""
    kinds = ("full_attention", "sliding_attention")
    both = hf.get("rope_parameters") or dict.fromkeys(kinds)
    if not isinstance(both, dict) or not {*both} & {*kinds}:
        raise ValueError(f"rope_parameters is {both}; it needs a table for each of {kinds}")
    wide, local = ({**(both.get(kind) or {})} for kind in kinds)
    # Default thetas: the top-level keys of transformers 4.
    thetas = hf.get("rope_theta", 1_000_000.0), hf.get("rope_local_base_freq", 10_000.0)
    return (
        hf_names.rope_of({"rope_scaling": wide | (hf.get("rope_scaling") or {})}, theta=thetas[0]),
        hf_names.rope_of({"rope_scaling": local}, theta=thetas[1]),
    )


def _layer_types(config: Gemma3Config) -> list[str]:
    kinds = ("full_attention", "sliding_attention")
    return [kinds[config.is_local(layer)] for layer in range(config.n_layers)]


def _rope_factor(rope: dict[str, Any]) -> float:
    kind = rope["rope_type"]
    if kind not in ("default", "linear"):
        raise ValueError(
            f"the rope_type of global layers is {kind}; titan's model has linear and no other"
        )
    return float(rope.get("factor", 1.0)) if kind == "linear" else 0.0
