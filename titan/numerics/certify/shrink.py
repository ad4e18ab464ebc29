"""A small job with the rules and ratios of a user's job, which ten steps on a CPU can prove. Imports no torch.

Whatever decides how a job is laid out stays: the ratio of query to key/value heads, layers of each kind, shared experts, top_k and
groups of the router, remainders of the vocabulary, and all techniques of the job. Sizes shrink: width, heads, experts, tokens. A family
whose sizes depend on each other in another way defines `shrink(sizes)`, which returns the job's keys with small values, and so may
the options of a task.

Example: Llama 3 8B has 32 layers, 32 query and 8 key/value heads of 128 channels, width 4096, SwiGLU 14336 and 128,256 tokens. It
becomes 4 layers, 8 and 2 heads of 16 channels, width 128, SwiGLU 448 and 512 tokens. An odd number of layers stays odd.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from itertools import count
from math import ceil
from typing import Any, get_type_hints

from titan.config.model import (
    family,
    frozen_names,
    parameter_counts,
    replace_fields,
)
from titan.config.phases import DEGREES, longest_sequence, sequence_lengths
from titan.config.quantize import FLOAT8
from titan.config.schema import JobConfig
from titan.config.task import any_options
from titan.numerics.tables import TABLES

STEPS, BATCH, LENGTH, VOCABULARY, WINDOW, UNIT, CLIPPED = 10, 8, 64, 512, 24, 16, 0.1
_UNSET = (
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_layers_per_stage",
    "optimizer.state_dtype",
    "lr_scheduler.total_steps",
)


def small_keys(config: JobConfig, *, tp: int, n_layers: int | None = None) -> dict[str, Any]:
    """Return the keys that make a job small, in any layout.

    Args:
        config: the job.
        tp: its tensor-parallel degree, which may exceed the number of key/value heads.
        n_layers: number of layers, if the family's own `shrink` takes it. None: the least with a layer of each kind.
    """
    section, ac, sizes = config.model, config.activation_checkpoint, config.model.sizes
    own = getattr(family(section.name), "shrink", None)
    keys: dict[str, Any] = {
        **TABLES["small"],
        **dict.fromkeys(_UNSET),
        "training.seq_len": LENGTH,
        "training.steps": STEPS,
        "training.global_batch_size": BATCH,
        # A small model's gradients are small, and what is never clipped proves nothing about clipping.
        "training.max_norm": min(config.training.max_norm, CLIPPED),
        "loss.chunk_tokens": min(config.loss.chunk_tokens, 100),
        # It has the traps of inductor, and takes a tenth of the time.
        "compile.backend": f"aot_eager{'_decomp_partition' * (ac.mode == 'memory_budget')}",
        "compile.mode": "default",
    }
    if own is not None:
        takes_depth = "n_layers" in inspect.signature(own).parameters
        keys |= own(sizes, n_layers=n_layers) if takes_depth else own(sizes)
        keys["model.overrides"] = dict(section.overrides) | keys["model.overrides"]
    else:
        # MXFP8 scales blocks of 32 values, and torch._scaled_mm wants multiples of 16.
        unit = UNIT * (1 + any(name.endswith(".mx") for name in section.converters))
        small = small_sizes(sizes, tp=tp, longest=longest_sequence(config), unit=unit)
        keys["model.overrides"] = small | ({"n_layers": n_layers} if n_layers else {})
    keys |= any_options(config).shrink()
    for name in ("fsdp_blocks_per_unit", "fsdp_kept_blocks"):
        keys[f"parallelism.{name}"] = min(getattr(config.parallelism, name), 2)
    if ac.selective_ac_option not in ("op", "1"):
        keys["activation_checkpoint.selective_ac_option"] = "2"
    if ac.op_keep_by_block and not ac.op_keep:
        keys["activation_checkpoint.mode"] = "full"
    if config.optimizer.name == "AdamW8bit":
        keys["optimizer.implementation"] = (
            "for-loop"  # fused, inductor compiles it for a minute
        )
    for name in config.model.converters:
        name = "quantize.linear.float8" if name in FLOAT8 else name
        keys[f"{name}.emulate"] = True
    if config.phase:
        keys |= _small_phases(config)
    keys |= {"model.freeze": _small_freeze(config, sizes, keys)} if section.freeze else {}
    return keys


def changed(config: JobConfig, keys: Mapping[str, Any]) -> JobConfig:
    """Return a job with other values of some keys, "section.key". Keys that it lacks are left out, and tables are merged."""
    data = config.model_dump()
    for key, value in keys.items():
        *path, last = key.split(".")
        table = data
        for name in path:
            table = table.get(name, {})
        if last in table:
            table[last] = {**table[last], **value} if isinstance(value, dict) else value
    return JobConfig.model_validate(data)


def small_sizes(sizes: Any, *, tp: int, longest: int, unit: int = UNIT) -> dict[str, Any]:
    """Return small values of a model's fields, by the names that titan reads of every family, and of other fields by what they change.

    Args:
        sizes: the model's sizes.
        tp: tensor-parallel degree of the job.
        longest: longest sequence of the job, in tokens.
        unit: divides all widths, and the channels of a head if there are few heads.
    """
    types = get_type_hints(type(sizes))
    fields = {f.name for f in dataclasses.fields(sizes) if f.init and types[f.name] is int}
    ratio = sizes.n_heads // sizes.n_kv_heads
    groups = 1 if tp > sizes.n_kv_heads else min(sizes.n_kv_heads, 4 if ratio <= 2 else 2)
    head = min(unit if groups * ratio <= UNIT else unit // 2, sizes.head_dim)
    width = sizes.n_heads * sizes.head_dim
    dim = _scaled(sizes.dim, groups * ratio * head, width, unit)
    small = {
        "n_heads": groups * ratio,
        "n_kv_heads": groups,
        "head_dim": head,
        "dim": dim,
        # The remainder decides whether ranks share the vocabulary evenly, and whether float8 takes the matrix.
        "vocab_size": min(sizes.vocab_size, VOCABULARY + sizes.vocab_size % unit),
        "n_dense_layers": min(sizes.n_dense_layers, 1),
        "num_mtp_modules": min(sizes.num_mtp_modules, 1),
    }
    if sizes.num_experts:
        small["num_experts"] = _num_experts(sizes)
    for name in sorted(fields - small.keys() - {"n_layers"}):
        value = getattr(sizes, name)
        if "window" in name:
            small[name] = min(value, WINDOW)
            continue
        # The number of parameters tells what is a size of the model.
        half = {name: value // 2}
        if value > 2 * unit and replace_fields(sizes, half).num_params < sizes.num_params:
            # Channels of a head, such as those of latent attention, shrink as heads do.
            of_head = "head_dim" in name
            scale = (head, sizes.head_dim, unit // 2) if of_head else (dim, sizes.dim, unit)
            # A table of positions has room for the longest sequence.
            small[name] = max(_scaled(value, *scale), 4 * LENGTH if value >= longest else 0)
    small = {name: value for name, value in small.items() if name in fields}
    small["n_layers"] = _num_layers(replace_fields(sizes, small))
    return small


def _scaled(value: int, small: int, large: int, unit: int) -> int:
    return max(unit, unit * round(value * small / large / unit))


def _num_experts(sizes: Any) -> int:
    """Return the least number of experts with the job's groups and twice as many experts as a token goes to."""
    groups, best = sizes.num_groups or 1, sizes.top_groups or 1
    each = max(
        ceil(sizes.top_k / best),
        sizes.group_top_k,
        ceil(2 * sizes.top_k / groups),
    )
    each += each * groups % 2  # ranks share them
    return min(sizes.num_experts, each * groups)


def _num_layers(sizes: Any) -> int:
    """Return the least number of layers, four or five or more, with a layer of each kind."""

    def kinds(number: int) -> set[tuple[bool, bool]]:
        layers = range(number)
        return {(bool(sizes.window_of(n)), bool(sizes.is_moe_layer(n))) for n in layers}

    whole, least = kinds(sizes.n_layers), 4 + sizes.n_layers % 2
    fit = (n for n in count(least, 2) if n >= sizes.n_layers or kinds(n) == whole)
    return min(sizes.n_layers, next(fit))


def _small_phases(config: JobConfig) -> dict[str, Any]:
    """Return the job's phases, spread over the steps, with its lengths and batches in the same order of size."""
    lengths = sorted(sequence_lengths(config))
    small = {length: LENGTH << min(place, 2) for place, length in enumerate(lengths)}
    steps, number = max(STEPS, 2 * len(config.phase) + 2), len(config.phase) + 1
    base, phases, batch = config.training.global_batch_size, [], BATCH
    unset = dict.fromkeys((*DEGREES, "from_tokens", "weights", "local_batch_size"))
    for place, phase in enumerate(config.phase, 1):
        if phase.global_batch_size:
            batch = BATCH << (phase.global_batch_size > base)
        own = {
            "from_step": 1 + place * steps // number,
            "seq_len": phase.seq_len and small[phase.seq_len],
            "global_batch_size": batch,
        }
        phases.append({**phase.model_dump(), **unset, **own})
    keys = {"phase": phases, "training.steps": steps}
    if len(small) > 1:  # the length of a task that reads no text is its own
        keys["training.seq_len"] = small[config.training.seq_len]
    return keys


def _small_freeze(config: JobConfig, sizes: Any, keys: Mapping[str, Any]) -> list[str]:
    """Return the frozen parameters of the small model: those whose namesake in the job's model is frozen.

    The first half of the small model's blocks stands for the first blocks of the job's model, the other half for its last.
    """
    section = config.model
    names = parameter_counts(section.name, sizes)
    frozen, blocks = frozen_names(names, section.freeze), sizes.num_blocks
    small = changed(config, {**keys, "model.freeze": []}).model
    few = small.sizes.num_blocks

    def namesake(name: str) -> str:
        if not (block := re.match(r"layers\.(\d+)", name)):
            return name
        place = int(block[1])
        place += (blocks - few) * (2 * place >= few)
        return f"layers.{place}{name[block.end() :]}"

    counts = parameter_counts(small.name, small.sizes)
    return [name for name in counts if namesake(name) in frozen]
