"""Mixtral in `transformers` (MixtralForCausalLM): names, and config.json. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..common import hf_names
from .config import MixtralConfig

ARCHITECTURES = {"MixtralForCausalLM": "mixtral"}

_BLOCK = {
    **hf_names.BLOCK,
    "moe.router.gate": "block_sparse_moe.gate",
    "moe.experts.w1": "block_sparse_moe.experts.{}.w1",
    "moe.experts.w2": "block_sparse_moe.experts.{}.w2",
    "moe.experts.w3": "block_sparse_moe.experts.{}.w3",
}
_FIELDS: tuple[hf_names.Field, ...] = (
    ("num_experts", "num_local_experts", ...),
    ("top_k", "num_experts_per_tok", ...),
    ("expert_dim", "intermediate_size", ...),
)


def hf_name(name: str) -> str:
    """Return the name of one of our parameters in transformers.

    Raises:
        KeyError: Mixtral has no parameter of this name.
    """
    return hf_names.hf_name(name, block=_BLOCK)


def hf_config(config: MixtralConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    return {
        **hf_names.header(ARCHITECTURES, "MixtralForCausalLM"),
        **hf_names.hf_config(config),
        **hf_names.fields_of(config, _FIELDS),
        "max_position_embeddings": 32_768,
        "sliding_window": None,
    }


def read_config(hf: dict[str, Any]) -> MixtralConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Mixtral.
    """
    only = {"sliding_window": None}
    hf = hf_names.renamed(hf, "num_experts", "num_local_experts")
    return hf_names.read_sizes(hf, MixtralConfig, of="mixtral", fields=_FIELDS, only=only)
