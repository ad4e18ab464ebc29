"""Families with windows, Mistral and Gemma 3, against transformers' implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

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


def test_local_layers_read_as_far_as_their_windows() -> None:
    """A token reaches through four local layers three windows and no further, and through a global one to the end."""
    config = small("gemma3", {"window": 5, "global_every": 5})
    for every, reach in ((5, 4 * 4), (4, 99)):
        model = gemma3.build_model(dataclasses.replace(config, global_every=every))
        initialize(model, seed=1, std_of=lambda _: 0.2)
        tokens = torch.randint(config.vocab_size, (1, 100))
        other = tokens.clone()
        other[0, 0] += 1
        with torch.no_grad():
            changed = (model(tokens) != model(other)).any(-1).nonzero()[:, 1]
        assert changed.max() == reach


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; .* None"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_other_models_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    hf = FAMILIES[name][1]
    with pytest.raises(ValueError, match=message):
        hf.read_config(hf.hf_config(small(name, {"n_layers": 2})) | changes)
