"""Translate Qwen3 to and from `transformers` (Qwen3ForCausalLM): as Llama, and the norms within
heads. Imports no torch."""

from __future__ import annotations

from typing import Any

from ..llama3 import huggingface as llama3
from .config import Qwen3Config

ARCHITECTURE, MODEL_TYPE = "Qwen3ForCausalLM", "qwen3"

_BLOCK = {
    **llama3.BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def hf_name(name: str) -> str:
    """Name in transformers of one of our parameters. Raises KeyError for a name that is not Qwen3's."""
    return llama3.hf_name(name, block=_BLOCK)


def hf_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    return {
        **llama3.hf_config(config),
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "max_position_embeddings": 40_960,
    }


def read_config(hf: dict[str, Any]) -> Qwen3Config:
    """Return the sizes of a config.json. Raises ValueError if it describes something else than Qwen3."""
    return llama3.read_sizes(hf, Qwen3Config, n_kv_heads=32, head_dim=128)
