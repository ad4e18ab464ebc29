"""Megatron's arguments as config.json of a Hugging Face model, and as the sections of a job.

Update k of Megatron has the rate of k - 1 finished updates, and so has titan's decay. Warm-up differs by one: (k - 1) / W
there, k / W here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from titan.base.untrusted import printable
from titan.checkpoint import CheckpointError
from titan.config.toml import table_beside

# Megatron's command line cannot change these.
_YARN = {
    "type": "yarn",
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_BALANCING = {
    "none": "",
    "aux_loss": "global_balance_coeff",
    "global_aux_loss": "global_balance_coeff",
    "seq_aux_loss": "sequence_balance_coeff",
}

Arguments = Mapping[str, Any]
TABLES = table_beside(__file__, "tables.toml")
# Megatron has these values of Llama 3.1 in its code.
_LLAMA_31 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(arguments: Arguments, *, vocab_size: int) -> dict[str, Any]:
    """Return config.json of the model.

    Args:
        arguments: arguments of Megatron's run.
        vocab_size: rows of the embeddings.

    Raises:
        CheckpointError: titan or transformers has no such model. The message names the arguments.
    """
    if others := [*differing_arguments(arguments, TABLES["only"])]:
        raise _refused(", ".join(others))
    is_grouped = arguments.get("group_query_attention")
    groups = "num_query_groups" if is_grouped else "num_attention_heads"
    config = _filled("config", arguments) | {
        "num_key_value_heads": arguments[groups],
        "vocab_size": vocab_size,
        "tie_word_embeddings": not arguments["untie_embeddings_and_output_weights"],
        "rope_scaling": None,
        "hidden_act": "silu",
    }
    if arguments.get("use_rope_scaling"):
        config["rope_scaling"] = {**_LLAMA_31, "factor": arguments["rope_scaling_factor"]}
    has_norms = arguments.get("qk_layernorm")
    if arguments.get("multi_latent_attention"):
        return config | _deepseek(arguments)
    if arguments.get("num_experts"):
        return config | _experts(arguments, "qwen3_moe" if has_norms else "mixtral")
    biased = "qwen2" if arguments.get("add_qkv_bias") else "llama"
    return config | _named("qwen3" if has_norms else biased)


def _filled(table: str, arguments: Arguments) -> dict[str, Any]:
    """Return the keys of a table with the values of their arguments."""
    return {key: arguments[argument] for key, argument in TABLES[table].items()}


def differing_arguments(arguments: Arguments, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that have other values than these."""
    for key, value in values.items():
        found = arguments.get(key, value)
        # None and 0 stand for false.
        if found != value and (found or value):
            yield f"{key} = {printable(str(found), 60)}"


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"arguments of the run: {printable(what, 400)}: titan has no such model"
    )


def _named(kind: str) -> dict[str, Any]:
    """Return the fields that name a class of transformers."""
    name = kind.title().replace("_", "")
    return {"architectures": [f"{name}ForCausalLM"], "model_type": kind}


def _experts(arguments: Arguments, kind: str) -> dict[str, Any]:
    """Return the fields of Mixtral, or of Qwen3, whose queries and keys have norms."""
    only = {
        "moe_router_score_function": "softmax",
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
    }
    # Megatron takes the softmax of the chosen logits, or chooses from the softmax of all.
    before = arguments.get("moe_router_pre_softmax")
    others = [*differing_arguments(arguments, only)]
    if _dense_layers(arguments):
        others.append("moe_layer_freq")
    fields = _filled("config_moe", arguments)
    if kind == "mixtral":
        others += ["moe_router_pre_softmax"] * bool(before)
        fields["intermediate_size"] = fields["moe_intermediate_size"]
        fields["router_aux_loss_coef"] = balance(arguments)["global_balance_coeff"]
    if others:
        raise _refused(", ".join(others))
    return {**_named(kind), **fields, "norm_topk_prob": not before}


def _deepseek(arguments: Arguments) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3."""
    # transformers' norms of latents have this epsilon, whatever the other norms have.
    only = {"moe_router_score_function": "sigmoid", "layernorm_epsilon": 1e-6}
    others = [*differing_arguments(arguments, only)]
    chosen, groups = arguments["moe_router_topk"], arguments.get("moe_router_group_topk") or 1
    # Megatron normalizes no single weight, and ranks a group by this many of its experts, transformers by two.
    if chosen == 1 or (arguments.get("moe_router_num_groups") and chosen // groups != 2):
        others.append(f"moe_router_topk = {chosen} with moe_router_group_topk = {groups}")
    scale = arguments["rotary_scaling_factor"]
    is_yarn = (arguments.get("rope_type") or "yarn") == "yarn"
    if scale != 1 and not is_yarn and arguments["mscale_all_dim"]:
        others.append(
            "rope_type = rope with mscale_all_dim"
        )  # which scales the softmax all the same
    if others:
        raise _refused(", ".join(others))
    shared = arguments.get("moe_shared_expert_intermediate_size") or 0
    fields = {
        **_named("deepseek_v3"),
        **_filled("config_moe", arguments),
        **_filled("config_mla", arguments),
        "n_shared_experts": shared // arguments["moe_ffn_hidden_size"],
        "first_k_dense_replace": _dense_layers(arguments),
        "routed_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": arguments.get("moe_router_num_groups") or 1,
        "topk_group": groups,
        "num_nextn_predict_layers": arguments.get("mtp_num_layers") or 0,
    }
    if scale != 1 and is_yarn:
        fields["rope_scaling"] = {**_YARN, **_filled("config_yarn", arguments)}
    return fields


def _dense_layers(arguments: Arguments) -> int:
    """Return the number of first layers without experts."""
    frequency = arguments.get("moe_layer_freq", 1)
    if frequency == 1:
        return 0
    pattern = frequency if isinstance(frequency, list) else []
    dense = pattern.count(0)
    if not pattern or 0 in pattern[dense:]:
        raise _refused(f"moe_layer_freq = {frequency}")
    return dense


def balance(arguments: Arguments) -> dict[str, float]:
    """Return titan's coefficients of the losses beside the main loss.

    Raises:
        CheckpointError: titan has no such balance loss.
    """
    kind = arguments.get("moe_router_load_balancing_type", "none")
    if kind not in [*_BALANCING]:
        raise _refused(f"moe_router_load_balancing_type = {kind}")
    coeff = arguments.get("moe_aux_loss_coeff") or 0.0
    has_bias = arguments.get("moe_router_enable_expert_bias")
    # Megatron divides by the tokens that a module predicts, titan by all. Equal for one module.
    length = arguments["seq_length"]
    further = (arguments.get("mtp_loss_scaling_factor") or 0.0) * length / (length - 1)
    return {
        "load_balance_coeff": arguments["moe_router_bias_update_rate"] if has_bias else 0.0,
        "sequence_balance_coeff": 0.0,
        "global_balance_coeff": 0.0,
        "router_z_loss_coeff": arguments.get("moe_z_loss_coeff") or 0.0,
        "mtp_coeff": further,
        **({_BALANCING[kind]: coeff} if _BALANCING[kind] else {}),
    }


def sections(arguments: Arguments, schedule: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a job that continues the training.

    Args:
        arguments: arguments of Megatron's run.
        schedule: state of Megatron's schedule of the learning rate, whose steps are samples.

    Raises:
        CheckpointError: titan has no such optimizer or schedule.
    """
    samples = arguments["global_batch_size"]
    decay_steps = schedule["lr_decay_steps"] // samples
    style, ratio = schedule["lr_decay_style"], None
    if style == "constant":
        style, ratio = "linear", 0.0
    elif style == "WSD":
        style = arguments["lr_wsd_decay_style"]
        wanted = arguments.get("lr_wsd_decay_iters")
        wanted = wanted or arguments["lr_wsd_decay_samples"] // samples
        ratio = wanted / decay_steps
    known = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
    kind = arguments.get("optimizer", "adam")
    if kind != "adam" or style not in known:
        what = printable(f"optimizer {kind}, lr_decay_style {style}", 80)
        raise CheckpointError(
            f"{what}: titan continues Adam, with constant, linear, cosine or minus_sqrt decay; --model-only leaves them out"
        )
    is_decoupled = arguments.get("decoupled_weight_decay", True)
    is_short = arguments.get("bf16") or arguments.get("fp16")
    scheduler = {
        "warmup_steps": schedule["lr_warmup_steps"] // samples,
        "total_steps": decay_steps,
        "decay_type": known[style],
        "min_lr_factor": schedule["min_lr"] / schedule["max_lr"],
    }
    return {
        "optimizer": {
            "name": "AdamW" if is_decoupled else "Adam",
            "lr": schedule["max_lr"],
            **_filled("optimizer", arguments),
        },
        "lr_scheduler": scheduler if ratio is None else {**scheduler, "decay_ratio": ratio},
        "training": {
            **_filled("training", arguments),
            "steps": arguments.get("train_iters") or arguments["train_samples"] // samples,
            "mixed_precision_param": "auto" if is_short else "float32",
        },
    }
