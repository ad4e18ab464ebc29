"""Sizes of small causal language models of `transformers`: three variants of each class.

Variant 0 is the same for all classes. Variants 1 and 2 are drawn by the name of the class, and differ in each field that has two values or
more: heads, layers and their kinds, embeddings, vocabulary, experts. A draw that transformers itself does not run is drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import torch

VOCABULARY = 128
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # a pipeline cannot have them
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    # Latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Indexers: fewer keys than a document of the tests has
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    # Linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 128,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(
        ("attn_pdrop", "residual_dropout", "embedding_dropout", "resid_dropout"), 0.0
    ),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("activation_dropout", "dropout", "layerdrop", "attn_dropout"), 0.0),
}
# Layers of both kinds among few. None: the class's own value.
LAYERS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3},
    "kimi_linear": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bamba": {"attn_layer_indices": [3]},
    "granitemoehybrid": {"layer_types": ["mamba"] * 3 + ["attention"]},
    "bailing_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2": {
        "layer_types": ["conv"] * 3 + ["full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv"] * 3 + ["full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "num_hidden_layers": None,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
        "head_dim": None,
        "tie_word_embeddings": True,  # so that its blocks share theirs
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

# Settings without which titan or transformers refuses a class: its default config leaves them out, or has a soft cap.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None},
    "vaultgemma": {"attn_logit_softcapping": None},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1},
}
# Fields of variants 1 and 2. Each variant takes another of the values.
HEADS = ((8, 1), (8, 2), (8, 4), (8, 8), (4, 1), (4, 4))
VARIED: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (4, 5, 6),
    "head_dim": (8, 16, 24, 32),
    "vocab_size": (VOCABULARY, 131),
    "sliding_window": (5, 8, 20),
    "kv_lora_rank": (16, 24),
    "v_head_dim": (8, 16, 24),
    "linear_num_value_heads": (4, 8),
    "mamba_n_groups": (1, 2, 4),
    "num_kv_shared_layers": (0, 1, 2),
    # Experts
    **dict.fromkeys(
        ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), (0, 2)
    ),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval"), (1, 2)),
    "mlp_only_layers": ([], [1]),
    # What is on or off
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), (False, True)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "use_qkv_bias", "use_bias"), (False, True)),
    **dict.fromkeys(("use_parallel_residual", "use_sliding_window"), (False, True)),
    **dict.fromkeys(("mamba_rms_norm", "attention_k_eq_v", "norm_topk_prob"), (False, True)),
}
# Names of one number.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
BY_LAYER = ("layer_types", "mlp_layer_types")

# Fields without which a class whose default is None does not build.
NEEDED = {
    "vocab_size",
    "hidden_size",
    "pad_token_id",
    "num_experts_per_tok",
    "n_routed_experts",
}
NEEDED |= {"moe_intermediate_size", "head_dim"}


def families() -> dict[str, str]:
    """Return transformers' causal language models: class by model_type, each class once."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names,
    )

    found = {kind: n if isinstance(n, str) else n[0] for kind, n in names.items()}
    # Of the model types that share a class, the one that its config class names.
    kinds = {architecture: kind for kind, architecture in reversed(found.items())}
    shared = {n for n in kinds if [*found.values()].count(n) > 1}
    kinds |= {n: getattr(transformers, n).config_class.model_type for n in shared}
    return {kind: n for kind, n in found.items() if kinds[n] == kind}


def overrides_of(architecture: str, variant: int = 0) -> dict[str, Any]:
    """Return the fields that make a model small, in one of three ways."""
    return dict(drawn(architecture, variant)[0]) if variant else _same_for_all(architecture)


@cache
def drawn(architecture: str, variant: int) -> tuple[dict[str, Any], int]:
    """Return the fields of variant 1 or 2, and how many draws transformers did not run before it ran one."""
    for attempt in range(20):
        fields = _draw(architecture, variant, attempt)
        if _runs(architecture, fields):
            return fields, attempt
    raise ValueError(f"transformers runs none of 20 draws of {architecture}")


def _draw(architecture: str, variant: int, attempt: int) -> dict[str, Any]:
    import transformers

    config: dict[str, Any] = getattr(transformers, architecture).config_class().to_dict()
    fields = _same_for_all(architecture)
    is_latent = "kv_lora_rank" in fields

    def pick(key: str, values: Sequence[Any]) -> Any:
        order = Random(f"{architecture} {key} {attempt}").sample(values, len(values))
        return order[(variant - 1) % len(values)]

    if "num_attention_heads" in fields:
        pairs = [pair for pair in HEADS if not is_latent or pair[0] == pair[1]]
        heads, kv_heads = pick("heads", pairs)
        fields["num_attention_heads"] = heads
        if "num_key_value_heads" in fields:
            fields["num_key_value_heads"] = kv_heads
    fields |= dict.fromkeys(fields.keys() & EXPERTS, pick("experts", (4, 6)))
    for key, values in VARIED.items():
        if key not in fields and (key in SMALL or config.get(key) is None):
            continue  # turned off, or derived
        if key == "head_dim":
            # pyrefly: ignore[unbound-name]
            usual = fields["hidden_size"] // heads  # some classes have no other
            values = [usual] if attempt > 9 else [v for v in values if v != usual]
            values = [] if is_latent else values
        fields |= {key: pick(key, values)} if values else {}
    for key in BY_LAYER:
        kinds = sorted({*(fields.get(key) or config.get(key) or ())})
        if len(kinds) > 1:
            rng = Random(f"{architecture} {key} {variant} {attempt}")
            more = rng.choices(kinds, k=fields["num_hidden_layers"] - len(kinds))
            fields[key] = rng.sample(kinds + more, len(kinds + more))
    return fields


def _runs(architecture: str, fields: dict[str, Any]) -> bool:
    """Return whether transformers alone runs a model."""
    import transformers

    kind = getattr(transformers, architecture)
    try:
        config = kind.config_class(**fields)
        model = kind._from_config(config, attn_implementation="eager")
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    except Exception:
        return False
    return True


def _same_for_all(architecture: str) -> dict[str, Any]:
    import transformers

    kind = getattr(transformers, architecture).config_class
    config, fields = kind(), {}
    for key, value in SMALL.items():
        try:
            now = getattr(config, key)
        except Exception:
            continue
        is_off = key not in NEEDED and (now is None or (key == "sliding_window" and not now))
        if is_off or isinstance(getattr(kind, key, None), property):
            continue  # turned off, or derived
        fields[key] = value
    if getattr(config, "qk_nope_head_dim", None) and getattr(config, "head_dim", None):
        fields["head_dim"] = (
            8 if config.head_dim == config.qk_rope_head_dim else fields["head_dim"]
        )
    if (
        config.num_key_value_heads == config.num_attention_heads
        if hasattr(config, "num_key_value_heads")
        else False
    ):
        fields["num_key_value_heads"] = 4
    fields |= LAYERS.get(config.model_type, {})
    fields = {k: v for k, v in fields.items() if v is not None}
    return fields | SETTINGS.get(config.model_type, {})
