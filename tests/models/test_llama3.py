"""Llama 3 (and dense Qwen3's sizes) against the published counts, transformers' implementation and torch's FLOP counter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.tables import table
from titan.config.model import family
from titan.models.llama3 import FLAVORS, LlamaConfig, build_model
from titan.models.llama3.huggingface import hf_name, read_config
from titan.parallel import initialize, materialize


def draw(model: torch.nn.Module, seed: int = 1) -> None:
    """Weights large enough that attention is far from uniform: a wrong rotation then shows."""
    initialize(model, seed=seed, std_of=lambda name: None if "norm" in name else 0.2)


SMALL = dataclasses.replace(FLAVORS["tiny"], n_layers=2)


# Family and flavor: parameters, theta, and the factor of Llama 3.1's scaling. Counts are those of the published weights (of Qwen3
# with tied embeddings counted once). Those of the debug models follow from the sizes in TorchTitan 0.2.2: 2 x 2048 x 256 +
# 6 x 852,480 + 256, and 2048 x 256 + 8 x 3,932,928 + 256.
PUBLISHED = table(__file__, "published")


@pytest.mark.parametrize(
    ("name", "flavor"), [(name, flavor) for name in PUBLISHED for flavor in PUBLISHED[name]]
)
def test_published_parameter_counts(name: str, flavor: str) -> None:
    package = family(name)
    config = package.FLAVORS[flavor]
    with torch.device("meta"):
        model = package.build_model(config)
    count = sum(p.numel() for p in model.parameters())
    assert count == config.num_params
    assert [count, config.rope_theta, config.rope_factor] == PUBLISHED[name][flavor]


def _transformers_twin(config: LlamaConfig) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=131072,
            rope_parameters=rope,
            tie_word_embeddings=config.tied_embeddings,
        )
    ).eval()


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_factor": 8.0}, {"tied_embeddings": True, "n_kv_heads": 4}],
    ids=["grouped-query", "3.1 scaling", "tied, multi-head"],
)
def test_logits_equal_transformers(changes: dict) -> None:
    config = dataclasses.replace(SMALL, **changes)
    model = build_model(config)
    draw(model)
    twin = _transformers_twin(config)
    weights = {hf_name(name): p.detach() for name, p in model.named_parameters()}
    if config.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    twin.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (2, 300))
    with torch.no_grad():
        ours, theirs = model(tokens), twin(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_transformers_sees_the_scaling() -> None:
    """The comparison above would miss a wrong scaling if it made no difference."""
    scaled = build_model(dataclasses.replace(SMALL, rope_factor=8.0))
    plain = build_model(SMALL)
    draw(scaled)
    draw(plain)
    tokens = torch.randint(SMALL.vocab_size, (1, 300))
    assert (scaled(tokens) - plain(tokens)).abs().max() > 0.1


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(FLAVORS["1B"], n_layers=2)])
def test_flops_per_token_equal_the_flop_counter(config: LlamaConfig) -> None:
    """The counter counts the whole S x S attention: the "full" convention."""
    sequence = 512
    with torch.device("meta"):
        model = build_model(config)
        tokens = torch.zeros(1, sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    # The counter's attention backward is 2.5 times forward (flash recomputes S = QK^T); the convention takes 2.
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * sequence
    recomputed = attention // 2
    by_formula = config.flops_per_token(sequence)
    counted = counter.get_total_flops() / sequence
    assert counted in (by_formula, by_formula + recomputed)
    assert config.flops_per_token(sequence, causal=True) == by_formula - 3 * attention // 2


def test_document_mask_and_positions_equal_separate_documents() -> None:
    model = build_model(SMALL)
    draw(model)
    first, second = (
        torch.randint(SMALL.vocab_size, (1, 20)),
        torch.randint(SMALL.vocab_size, (1, 12)),
    )
    packed = torch.cat([first, second], dim=1)
    document_ids = torch.tensor([[0] * 20 + [1] * 12])
    positions = torch.tensor([[*range(20), *range(12)]])
    together = model(packed, positions, document_ids)
    apart = torch.cat([model(first), model(second)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert (model(packed) - apart).abs().max() > 0.1  # and the mask is what made them so


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_reserved_rotations_are_those_of_each_forward_pass(name: str) -> None:
    """On meta, in a model of bf16, for whole sequences and for given positions; any others are computed."""
    package = family(name)
    config = package.FLAVORS["tiny"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            plain, kept = (package.build_model(config) for _ in range(2))
            kept.reserve_positions(32)
    finally:
        torch.set_default_dtype(before)
    for model in (plain, kept):
        materialize(model, device="cpu")
        model.float()
    assert "rotations" not in kept.state_dict()
    draw(plain)
    draw(kept)
    tokens = torch.randint(config.vocab_size, (2, 32))
    positions = torch.stack([torch.arange(32).flip(0), torch.arange(32) // 2])
    for given in (None, positions, torch.arange(40, 72)):
        assert torch.equal(kept(tokens, given), plain(tokens, given))
    assert torch.equal(
        kept(tokens.repeat(1, 2)), plain(tokens.repeat(1, 2))
    )  # longer than reserved


def test_materialize_keeps_embeddings_tied() -> None:
    with torch.device("meta"):
        model = build_model(dataclasses.replace(SMALL, tied_embeddings=True))
    materialize(model, device="cpu")
    assert model.output.weight is model.tok_embeddings.weight  # pyrefly: ignore[missing-attribute]
    assert not any(p.is_meta for p in model.parameters())


def test_a_field_that_is_null_and_has_no_default_is_named() -> None:
    hf = {"model_type": "llama", "hidden_size": None}
    with pytest.raises(ValueError, match="hidden_size is missing"):
        read_config(hf)


@dataclass(frozen=True, kw_only=True)
class _WiderBlocks(LlamaConfig):
    """Family of another package that states the parameters of a block alone."""

    @property
    def num_block_params(self) -> int:
        return super().num_block_params + 100


def test_a_family_may_state_the_parameters_of_a_block_alone() -> None:
    sizes = FLAVORS["tiny"]
    wider = _WiderBlocks(**{f.name: getattr(sizes, f.name) for f in fields(sizes) if f.init})
    assert wider.num_params == sizes.num_params + 100 * sizes.n_layers
    assert wider.flops_per_token(64) == sizes.flops_per_token(64) + 600 * sizes.n_layers
