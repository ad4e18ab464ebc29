"""Parameter names of `transformers`' Qwen3ForCausalLM: as Llama's, and the norms within heads."""

from __future__ import annotations

from ..llama3 import huggingface as llama3

_BLOCK = {
    **llama3.BLOCK,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def hf_name(name: str) -> str:
    """Name in transformers of one of our parameters. Raises KeyError for a name that is not Qwen3's."""
    return llama3.hf_name(name, block=_BLOCK)
