"""Llama in `transformers` (LlamaForCausalLM): names of parameters, and config.json. Imports no torch.

Only names differ, tensors are the same: `rotate` in common/rotary.py pairs channel i with i + K/2, as transformers does.
Meta's original files (consolidated.*.pth) pair neighbours, and would need their wq and wk permuted.
"""

from __future__ import annotations

from typing import Any

from titan.models.common import hf_names
from titan.models.common.config import LlamaConfig

ARCHITECTURES = {"LlamaForCausalLM": "llama"}
hf_name = hf_names.hf_name


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of these sizes."""
    return {**hf_names.header(ARCHITECTURES, "LlamaForCausalLM"), **hf_names.hf_config(config)}


def read_config(hf: dict[str, Any]) -> LlamaConfig:
    """Return the sizes of a config.json.

    Raises:
        ValueError: The file does not describe Llama 3.
    """
    return hf_names.read_sizes(hf, LlamaConfig, of="llama")
