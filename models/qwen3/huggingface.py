"""Qwen3 in `transformers` (Qwen3ForCausalLM, Qwen3MoeForCausalLM): names, and config.json. Imports no torch."""

from __future__ import annotations

from typing import Any

from titan.models.common import hf_names

from .config import Qwen3Config

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}

_BLOCK = {
    **hf_names.BLOCK,
    **hf_names.MOE_BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
_EXPERTS: tuple[hf_names.Field, ...] = (
    ("num_experts", "num_experts", ...),
    ("top_k", "num_experts_per_tok", ...),
    ("expert_dim", "moe_intermediate_size", ...),
    ("normalize_weights", "norm_topk_prob", False),
)
# Experts in all blocks.
_ONLY: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: Qwen3 has no parameter of this name.
    """
    return hf_names.hf_name(name, block=_BLOCK)


def hf_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    architecture = "Qwen3MoeForCausalLM" if config.num_experts else "Qwen3ForCausalLM"
    experts = {**hf_names.fields_of(config, _EXPERTS), **_ONLY} if config.num_experts else {}
    return {
        **hf_names.header(ARCHITECTURES, architecture),
        **hf_names.hf_config(config),
        **experts,
        "max_position_embeddings": 40_960,
    }


def read_config(hf: dict[str, Any]) -> Qwen3Config:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Qwen3.
    """
    if "moe" not in str(hf.get("model_type") or hf.get("architectures")).lower():
        return hf_names.read_sizes(hf, Qwen3Config, of="qwen3")
    hf = hf_names.renamed(hf, "num_local_experts", "num_experts")  # as transformers 5 writes it
    return hf_names.read_sizes(hf, Qwen3Config, of="qwen3_moe", fields=_EXPERTS, only=_ONLY)
