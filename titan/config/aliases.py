"""Keys that had another name, or that this program has no use for: TorchTitan's of v0.2.2 and before.

Three tables. A renamed key moves to its new place and warns. A dropped key warns. A refused key stands for
something titan does not have: it is an error that says what to use instead, unless it is switched off (false,
empty), for then nothing was asked. Applied to each file on its own, before files are merged, so that an
overlay may use a new name over an older file's old one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import Problem, SourceLocation, key_text, parent
from .schema import ParallelismSection

RENAMED: dict[str, str] = {
    "float8.enable_float8_linear": "model.converters",
    "float8": "quantize.linear.float8",
    **{
        f"{section}.{key}": f"parallelism.{key}"
        for section in ("training", "experimental")
        for key in ParallelismSection.model_fields
    },
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "model.tokenizer_path": "tokenizer.path",
    "optimizer.fused": "optimizer.implementation",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "job.print_args": "job.print_config",
    "validation.enabled": "validation.enable",
    "metrics.enable_color_printing": "metrics.disable_color_printing",
    "metrics.rank_0_only": "metrics.save_for_all_ranks",
}

_TORCHFT = (
    *("process_group", "process_group_timeout_ms", "replica_id", "group_size"),
    *("min_replica_size", "semi_sync_method"),
)
DROPPED: dict[str, str] = {
    "job.use_for_integration_test": "it has no effect",
    "job.save_config_file": "config.toml in the run folder is always written",
    "validation.dataloader": "validation reads as [training.dataloader] says",
    "quantize.grouped_mm.mx.recipe_name": "only linear layers can be converted",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "torchao chooses the kernel",
    **{f"fault_tolerance.{key}": "torchft is not used" for key in _TORCHFT},
}

REFUSED: dict[str, str] = {
    "job.custom_config_module": "write [model] overrides, or register sections of your own through entry points "
    "(titan.optimizers, titan.sources)",
    "experimental.custom_args_module": "register your own parts through entry points (titan.models, "
    "titan.optimizers, titan.sources)",
    "experimental.custom_import": "register your own parts through entry points (titan.models, titan.optimizers, "
    "titan.sources)",
    "experimental.pipeline_parallel_split_points": "use parallelism.module_fqns_per_model_part",
    "experimental": "titan has no [experimental] section; its keys stand in [parallelism]",
    "fault_tolerance.enable": "a killed run resumes from its newest checkpoint: use `titan train --max-restarts`, and remove "
    "the key",
    "quantize.grouped_mm": "only linear layers can be converted: use [quantize.linear.float8]",
    "memory_estimation": "use `titan check`, which estimates memory without a GPU",
    "model.print_after_conversion": "the start-up page shows the model; remove the key",
    "model.norm_type": "Llama's norm is RMSNorm; remove the key",
    "training.debug_moe_force_load_balance": "titan has no such switch; remove the key",
    "debug.moe_force_load_balance": "titan has no such switch; remove the key",
    "parallelism.pipeline_parallel_split_points": "use parallelism.module_fqns_per_model_part",
    "parallelism.enable_compiled_autograd": "use [compile] enable = true",
    "checkpoint.interval_type": "intervals are counted in steps; remove the key",
    "checkpoint.enable_ft_dataloader_checkpoints": "the data position is in every checkpoint; remove the key",
    "checkpoint.initial_load_in_hf_quantized": "convert the weights to bfloat16 first",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "use op_keep",
    "activation_checkpoint.early_stop": "titan has no such switch; remove the key",
    "activation_checkpoint.visualize_memory_budget_pareto": "titan has no such switch; remove the key",
    "activation_checkpoint.determinism_check": "titan has no such switch; remove the key",
    "activation_checkpoint.debug": "titan has no such switch; remove the key",
    "training.gc_debug": "titan has no such switch; remove the key",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "titan has no such switch; remove the key",
    "parallelism.expert_parallel_comm_backend": "tokens travel by all-to-all; remove the key",
    "comm.mode": "use `titan check`, which needs no GPU",
    "debug.deterministic_warn_only": "use deterministic, which raises an error",
}

# What refused keys hold when they ask for nothing, besides false and empty values.
_HARMLESS: dict[str, Any] = {
    "model.norm_type": "rmsnorm",
    "checkpoint.interval_type": "steps",
    "checkpoint.enable_ft_dataloader_checkpoints": True,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "activation_checkpoint.determinism_check": "default",
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "parallelism.expert_parallel_comm_backend": "standard",
    "comm.mode": "default",
}


def _unless_boolean(convert: Callable[[bool], Any]) -> Callable[[Any], Any]:
    """Converts a boolean; anything else stays, and is told as a wrong type later."""
    return lambda value: convert(value) if isinstance(value, bool) else value


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "optimizer.fused": _unless_boolean(lambda fused: "fused" if fused else "foreach"),
    "float8.enable_float8_linear": _unless_boolean(
        lambda on: ["quantize.linear.float8"] if on else []
    ),
    "metrics.enable_color_printing": _unless_boolean(lambda on: not on),
    "metrics.rank_0_only": _unless_boolean(lambda on: not on),
}


@dataclass
class ConfigLayer:
    """What one file, or the command line, sets: its tables, and the place of every key."""

    data: dict[str, Any]
    locations: dict[str, SourceLocation]

    def holder(self, key: str, *, make: bool = False) -> dict[str, Any]:
        """The table in which the last part of `key` stands; empty where there is none."""
        table = self.data
        for name in parent(key).split(".") if parent(key) else []:
            inner = table.setdefault(name, {}) if make else table.get(name)
            if not isinstance(inner, dict):
                return {}
            table = inner
        return table

    def find(self, key: str) -> Any:
        return self.holder(key).get(key.rpartition(".")[2])

    def remove(self, key: str) -> Any:
        """Take out a key, and the table around it where that is left empty."""
        table = self.holder(key)
        value = table.pop(key.rpartition(".")[2])
        if not table and parent(key):
            self.remove(parent(key))
        return value

    def move(self, old: str, new: str, value: Any) -> None:
        self.remove(old)
        self.holder(new, make=True)[new.rpartition(".")[2]] = value
        for key in [k for k in self.locations if k == old or k.startswith((f"{old}.", f"{old}["))]:
            place = self.locations.pop(key)
            self.locations[new + key[len(old) :]] = SourceLocation(place.file, place.line, key)


def apply_aliases(layer: ConfigLayer) -> tuple[list[str], list[Problem]]:
    """Apply the tables to a layer, in place; returns warnings and problems."""
    warnings: list[str] = []
    problems: list[Problem] = []
    for old, new in RENAMED.items():
        value, name = layer.find(old), old.rpartition(".")[2]
        if name not in layer.holder(old) or ("." not in old and not isinstance(value, dict)):
            continue
        place = layer.locations[old]
        if other := layer.locations.get(new):
            message = f"is the old name of {new}, which {other} sets too; keep {new} only"
            problems.append(place.problem(message))
            layer.remove(old)
            continue
        layer.move(old, new, _CONVERTED.get(old, lambda same: same)(value))
        warnings.append(f"{place}: {old} is now {new}")
    for key, hint in (DROPPED | REFUSED).items():
        if key.rpartition(".")[2] not in layer.holder(key):
            continue
        value, place = layer.remove(key), layer.locations[key]
        if key in DROPPED or _is_off(value) or _HARMLESS.get(key) == value:
            warnings.append(f"{place}: {key} is ignored: {hint}")
            continue
        asked = [key]
        if isinstance(value, dict):
            asked = [f"{key}.{key_text([k])}" for k, inner in value.items() if not _is_off(inner)]
        problems += [
            layer.locations[k].problem(f"titan has no such setting; {hint}") for k in asked
        ]
    return warnings, problems


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enable") is False or all(map(_is_off, value.values()))
    return not value
