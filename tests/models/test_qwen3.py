"""Qwen3 against transformers' implementation; its published counts are in titan/contrib/torchtitan_import/tests/test_models.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from titan.models.qwen3 import FLAVORS, build_model
from titan.models.qwen3.huggingface import hf_name
from titan.parallel import initialize

SMALL = dataclasses.replace(FLAVORS["tiny"], n_layers=2)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(SMALL, tied_embeddings=tied)
    model = build_model(config)
    # Norms that are not all ones: the test would miss them otherwise.
    initialize(model, seed=1, std_of=lambda name: 0.2 if "_norm" not in name else 0.5)
    twin = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=tied,
        )
    ).eval()
    weights = {hf_name(name): p.detach() for name, p in model.named_parameters()}
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    twin.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (2, 100))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), twin(tokens).logits, rtol=1e-5, atol=1e-5)
