"""OLMoE in `transformers` (OlmoeForCausalLM): names, and config.json. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..common import hf_names
from .config import OlmoeConfig

ARCHITECTURES = {"OlmoeForCausalLM": "olmoe"}

_BLOCK = {
    **hf_names.BLOCK,
    **hf_names.MOE_BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
_FIELDS: tuple[hf_names.Field, ...] = (
    ("num_experts", "num_experts", ...),
    ("top_k", "num_experts_per_tok", ...),
    ("expert_dim", "intermediate_size", ...),
    ("normalize_weights", "norm_topk_prob", False),
)


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: OLMoE has no parameter of this name.
    """
    return hf_names.hf_name(name, block=_BLOCK)


def hf_config(config: OlmoeConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    return {
        **hf_names.header(ARCHITECTURES, "OlmoeForCausalLM"),
        **hf_names.hf_config(config),
        **hf_names.fields_of(config, _FIELDS),
        "max_position_embeddings": 4096,
        "clip_qkv": None,
    }


def read_config(hf: dict[str, Any]) -> OlmoeConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe OLMoE.
    """
    hf, only = hf_names.renamed(hf, "num_local_experts", "num_experts"), {"clip_qkv": None}
    return hf_names.read_sizes(hf, OlmoeConfig, of="olmoe", fields=_FIELDS, only=only)
