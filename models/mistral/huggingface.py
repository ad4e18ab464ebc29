"""Mistral in `transformers` (MistralForCausalLM): names, and config.json. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..common import hf_names
from .config import MistralConfig

ARCHITECTURES = {"MistralForCausalLM": "mistral"}
hf_name = hf_names.hf_name


def hf_config(config: MistralConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    written = {**hf_names.header(ARCHITECTURES, "MistralForCausalLM"), **hf_names.hf_config(config)}
    del written["attention_bias"]  # a key of Llama's
    return {
        **written,
        "max_position_embeddings": 32_768,
        "sliding_window": config.window or None,
    }


def read_config(hf: dict[str, Any]) -> MistralConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Mistral.
    """
    # null: no window.
    hf = {**hf, "sliding_window": hf.get("sliding_window", 4096) or 0}
    window: hf_names.Field = ("window", "sliding_window", 0)
    return hf_names.read_sizes(hf, MistralConfig, n_kv_heads=8, head_dim=0, fields=(window,))
