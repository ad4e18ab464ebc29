"""Imports of the census, done once in the server that ranks are forked from."""

from __future__ import annotations

from tests.support import hf_families  # noqa: F401
from titan.config.schema import ModelSection

_ = ModelSection(
    name="transformers",
    architecture="LlamaForCausalLM",
    overrides={"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 8},
).resolved
