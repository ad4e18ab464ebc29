"""Families with windows, Mistral and Gemma 3, against transformers' implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from titan.generation import Generator
from titan.models import gemma3, mistral
from titan.models.gemma3 import huggingface as gemma3_hf
from titan.models.mistral import huggingface as mistral_hf
from titan.parallel import initialize

FAMILIES = {
    "mistral": (mistral, mistral_hf, "MistralForCausalLM"),
    "gemma3": (gemma3, gemma3_hf, "Gemma3ForCausalLM"),
}
CASES = [
    ("mistral", {}),
    ("mistral", {"window": 0}),
    ("gemma3", {}),
    ("gemma3", {"rope_factor": 0.0, "global_every": 2, "window": 7}),
    ("gemma3", {"global_every": 9}),
]


def small(name: str, changes: dict[str, Any]) -> Any:
    return dataclasses.replace(FAMILIES[name][0].FLAVORS["tiny"], **{"n_layers": 4, **changes})


def twin_of(name: str, config: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, FAMILIES[name][2])
    hf = FAMILIES[name][1].hf_config(config)
    return kind._from_config(kind.config_class(**hf), attn_implementation="sdpa").eval()


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_logits_equal_transformers(name: str, changes: dict[str, Any]) -> None:
    """With windows that are shorter than the sequence. A window of one key more has other logits."""
    config = small(name, changes)
    family, hf, _ = FAMILIES[name]
    model = family.build_model(config)
    # Norms that are not all equal: the test would miss them otherwise.
    initialize(model, seed=1, std_of=lambda name: 0.5 if "norm" in name else 0.2)
    twin = twin_of(name, config)
    weights = {hf.hf_name(name): p.detach() for name, p in model.named_parameters()}
    weights |= {k: v for k, v in twin.state_dict().items() if "embed_scale" in k}
    if config.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    twin.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (2, 100))
    with torch.no_grad():
        expected = twin(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
        if config.window:
            for layer in range(config.n_layers):
                inner = model.get_submodule(f"layers.{layer}.attention.inner_attention")
                inner.window += bool(inner.window)
            assert (model(tokens) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_config_json_both_ways(name: str, changes: dict[str, Any]) -> None:
    """As titan writes it, and as transformers 5 does."""
    config, hf = small(name, changes), FAMILIES[name][1]
    assert hf.read_config(hf.hf_config(config)) == config
    assert hf.read_config(twin_of(name, config).config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "flavor"),
    [(n, flavor) for n, (family, *_) in FAMILIES.items() for flavor in family.FLAVORS],
)
def test_counts_equal_transformers(name: str, flavor: str) -> None:
    config = FAMILIES[name][0].FLAVORS[flavor]
    with torch.device("meta"):
        twin = twin_of(name, config)
    assert config.num_params == sum(p.numel() for p in twin.parameters())


def test_counts_as_published() -> None:
    assert mistral.FLAVORS["7B-v0.1"].num_params == 7_241_732_096
    assert gemma3.FLAVORS["270M"].num_params == 268_098_176
    assert gemma3.FLAVORS["1B"].num_params == 999_885_952


def test_embeddings_are_scaled_by_a_rounded_root() -> None:
    """The root of 640 is 25.298, and 25.25 in bfloat16."""
    config = small("gemma3", {"dim": 640})
    model = gemma3.build_model(config).bfloat16()
    initialize(model, seed=1, std_of=lambda _: 1.0)
    assert model.tok_embeddings is not None
    tokens = torch.arange(50)[None]
    assert torch.equal(model.embed(tokens), model.tok_embeddings(tokens) * 25.25)


def test_generated_text_is_that_of_whole_sequences() -> None:
    """Caches of local layers hold their window alone, and the text is longer."""
    model = gemma3.build_model(small("gemma3", {"window": 5}))
    initialize(model, seed=1, std_of=lambda _: 0.2)
    tokens = [7, 8, 9]
    text = [
        token
        for [token] in Generator(model=model, max_new_tokens=30).stream([tokens])
        if token is not None
    ]
    with torch.no_grad():
        logits = model(torch.tensor([tokens + text]))
    assert text == logits[0].argmax(-1)[2:-1].tolist()


def test_flops_count_what_windows_leave() -> None:
    config = dataclasses.replace(mistral.FLAVORS["tiny"], window=16)
    whole = dataclasses.replace(config, window=0)
    per_key = 12 * config.n_layers * config.n_heads * config.head_dim
    assert whole.flops_per_token(64) - config.flops_per_token(64) == per_key * (64 - 16)
    # In 64 rows, 16 x 16 / 2 pairs are missing where the window begins.
    causal = per_key * (64 * 16 - 16 * 16 // 2) // 64
    assert config.attention_flops_per_token(64, causal=True) == causal
    assert config.flops_per_token(8, causal=True) == whole.flops_per_token(8, causal=True)
    local = dataclasses.replace(gemma3.FLAVORS["tiny"], global_every=100)
    mixed = gemma3.FLAVORS["tiny"]  # two of eight layers are global
    keys = 12 * mixed.n_heads * mixed.head_dim * (64 - mixed.window)
    assert mixed.flops_per_token(64) - local.flops_per_token(64) == 2 * keys
