"""The host's pace in a job's step: measured by a tiny step of the job, and recorded like a trace (host_meter.py).

The pace does not depend on widths, batches, sequences, depths or most degrees. `tiny` makes them small, so that jobs that differ
only in them share a recording: a sweep needs a few. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from titan.config.layout import AXES, Layout
from titan.config.model import family
from titan.config.schema import JobConfig, QuantizeSection
from titan.config.task import any_options
from titan.sim.record.trace import Trace
from titan.sim.section import SimulatorSection

_BLOCKS = 4
"""Blocks of a tiny model."""
_SIZES = {
    "dim": 64,
    "head_dim": 16,
    "ffn_dim": 64,
    "vocab_size": 256,
    "window": 16,
    "num_experts": 8,
    "expert_dim": 32,
    "num_groups": 4,
    "top_groups": 2,
    "top_k": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Upper limits of a tiny model's sizes. Zeros, which turn a part off, stay."""
_DEGREES = {"dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 2}
"""Upper limits of degrees. FSDP cuts and joins a list with an entry for each shard."""
_TOKENS, _HEADS = 32, 8  # CPUs multiply in 8 bits one number at a time


def tiny(config: JobConfig, layout: Layout) -> tuple[JobConfig, Layout]:
    """Return a job with the same program as another, and small sizes, without pipeline, compilation, 8 bits and micro-batches.

    Compiled blocks are measured as eager ones. Their insides are left out (titan.sim.replay.host.Issue).
    """
    sizes, parallel = config.model.sizes, config.parallelism
    overrides = dict(config.model.overrides)
    for name in (field.name for field in fields(sizes) if field.init):
        if name in _SIZES and (value := getattr(sizes, name)):
            overrides[name] = min(value, _SIZES[name])
        elif name.endswith("_token"):
            overrides[name] = min(getattr(sizes, name), _SIZES["vocab_size"] - 1)
        elif name == "n_kv_heads":
            overrides[name] = _HEADS if sizes.n_kv_heads == sizes.n_heads else _HEADS // 2
        elif name == "n_dense_layers" and sizes.n_dense_layers < sizes.n_layers:
            overrides[name] = 0  # few of many
    overrides |= {"n_heads": _HEADS, "n_layers": min(sizes.n_layers, _BLOCKS)}
    if (shrink := getattr(family(config.model.name), "shrink", None)) is not None:
        overrides = dict(config.model.overrides) | shrink(sizes)["model.overrides"]
    small = {axis: min(most, layout.degrees[axis]) for axis, most in _DEGREES.items()}
    ep, lent = parallel.expert_parallel_degree, layout.dp_shard * layout.cp * layout.tp
    if 1 < ep < lent and small["dp_shard"] * small["cp"] * small["tp"] == 2:
        small["dp_shard"] *= 2  # experts are sharded over the rest
    shape = Layout(pp=1, accumulation=1, **small)
    all_shards = shape.dp_shard * shape.cp * shape.tp
    resharding = parallel.fsdp_reshard_after_forward
    if layout.pp > 1 and resharding == "default":
        resharding = "never"
    parallelism = {
        **{key.rpartition(".")[2]: shape.degrees[axis] for axis, key in AXES.items()},
        "expert_parallel_degree": all_shards if ep == lent else min(2, ep),
        "expert_tensor_parallel_degree": min(shape.tp, parallel.expert_tensor_parallel_degree),
        "pipeline_parallel_layers_per_stage": None,
        "module_fqns_per_model_part": None,
        "enable_async_tensor_parallel": False,
        "fsdp_reshard_after_forward": resharding,
        "fsdp_kept_blocks": min(parallel.fsdp_kept_blocks, _BLOCKS),
    }
    task = any_options(config).shrink()
    changes: dict[str, dict[str, Any]] = {
        "task": {"options": config.task.options | task.get("task.options", {})},
        "model": {"overrides": overrides, "attention_backend": "auto"},
        "parallelism": parallelism,
        "training": {
            "local_batch_size": 1,
            "seq_len": task.get("training.seq_len", _TOKENS),
            "global_batch_size": -1,
        },
        "loss": {"chunk_tokens": min(config.loss.chunk_tokens, _TOKENS // 4)},
        "compile": {"enable": False},
        # CPUs lack such kernels.
        "data": {"document_mask": False},
        # Save lists share a measurement: a step that keeps nothing differs from others by less than two measurements do.
        "activation_checkpoint": {"op_keep": [], "op_keep_by_block": []},
    }
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=update)
        for name, update in changes.items()
    }
    sections |= {"simulator": SimulatorSection(), "quantize": QuantizeSection()}
    return config.model_copy(update=sections), shape


def with_paces(
    jobs: Sequence[Any], done: Callable[[Any, Any], None]
) -> list[tuple[Any, Callable[[Any, Any], None]]]:
    """Return requests of tiny jobs, then those of the jobs, each with the function that takes its traces.

    Jobs share tiny jobs. `done` gets each job with its traces as soon as the pace of their host is
    known.
    """
    known: dict[str, dict[str, float]] = {}
    waiting: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def measured(key: str, _: Any, traces: dict[int, Trace] | Exception) -> None:
        # Without a pace, the usual pace counts.
        known[key] = next(iter(traces.values())).host if isinstance(traces, dict) else {}
        for job in waiting.pop(key, ()):
            recorded(key, *job)

    def recorded(key: str, request: Any, traces: dict[int, Trace] | Exception) -> None:
        if key not in known:
            waiting[key].append((request, traces))
            return
        pace = known[key]
        for trace in traces.values() if isinstance(traces, dict) else ():
            trace.host = pace and pace | {"accumulation": request.layout.accumulation}
        done(request, traces)

    hosts, others = {}, []
    for job in jobs:
        config, layout = tiny(job.config, job.layout)
        host = replace(job, config=config, layout=layout, of_host=True, prepare=None)
        hosts[host.key] = host, partial(measured, host.key)
        others.append((job, partial(recorded, host.key)))
    return [*hosts.values(), *others]
