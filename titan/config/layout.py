"""How a world of ranks is laid out: the degrees of the mesh axes, and the rules that need the number of ranks.

world size = pp x dp_replicate x dp_shard x cp x tp, and a step of global_batch_size sequences is
local_batch_size x data-parallel ranks x accumulation. Every rule says what the numbers come to and which
nearby values would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from titan.parallel.stages import plan_stages

from .model import resolve_model
from .problems import ConfigError, Finding, Problem
from .sections import JobConfig, ParallelismSection

# Axis and key of its degree, outermost first.
AXES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, and forward passes per optimizer step."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    accumulation: int

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)


def resolve_layout(config: JobConfig, world_size: int) -> Layout:
    """The layout of `world_size` ranks; raises `ConfigError` where `check_layout` finds problems."""
    if problems := check_layout(config, world_size=world_size):
        raise ConfigError(problems)
    degrees = _degrees(config) | {"dp_shard": _shard_degree(config, world_size)}
    batch, dp = config.training, degrees["dp_replicate"] * degrees["dp_shard"]
    accumulation = max(1, batch.global_batch_size // (batch.local_batch_size * dp))
    return Layout(**degrees, accumulation=accumulation)


def check_layout(config: JobConfig, *, world_size: int) -> list[Problem]:
    """Everything about the config that does not fit `world_size` ranks."""
    model = resolve_model(config.model)[0]
    # Where the degrees are wrong anyway, what would follow from them is no help.
    findings = [*_check_world(config, world_size)] or [
        *_check_batch(config, world_size),
        *_check_sequence(config),
        *_check_stages(config, model),
    ]
    findings += _check_heads(config, model)
    return [config.origin.problem(key, message) for key, message in findings]


def _degrees(config: JobConfig) -> dict[str, int]:
    return {axis: getattr(config.parallelism, key.rpartition(".")[2]) for axis, key in AXES.items()}


def _shard_degree(config: JobConfig, world_size: int) -> int:
    degrees = _degrees(config)
    shard = degrees.pop("dp_shard")
    return world_size // prod(degrees.values()) if shard == -1 else shard


def _check_world(config: JobConfig, world_size: int) -> Iterator[Finding]:
    degrees = _degrees(config)
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    product = prod(fixed.values())
    is_open = len(fixed) < len(degrees)
    if world_size == product or (is_open and world_size % product == 0):
        return
    spelt = " x ".join(
        f"{axis} {degree}" for axis, degree in fixed.items() if degree > 1 or not is_open
    )
    if is_open:
        why = f"{world_size} ranks / ({spelt}) is not whole"
    else:
        why = f"{spelt} = {product}, but there are {world_size} ranks"
    fixes = [
        f"{AXES[axis].rpartition('.')[2]} = {_either(values)}"
        for axis, degree in fixed.items()
        if (degree > 1 or axis == "dp_shard")
        and (
            values := _fitting(
                degree, rest=product // degree, world_size=world_size, is_open=is_open
            )
        )
    ]
    ranks = _around(world_size, product) if is_open else [product]
    fixes.append(f"{_either(ranks)} rank{'s' * (ranks != [1])}")
    key = AXES[max(fixed, key=lambda axis: (fixed[axis], axis == "dp_shard"))]
    yield key, f"{why}; {', or '.join(fixes)} would do"


def _fitting(degree: int, *, rest: int, world_size: int, is_open: bool) -> list[int]:
    """Degrees near `degree` with which the world factorises, the other fixed degrees multiplying to `rest`."""
    if world_size % rest:
        return []
    share = world_size // rest
    fitting = [d for d in range(1, share + 1) if share % d == 0] if is_open else [share]
    below = [d for d in fitting if d < degree][-1:]
    above = [d for d in fitting if d > degree][:1]
    return below + above


def _check_batch(config: JobConfig, world_size: int) -> Iterator[Finding]:
    training = config.training
    dp = config.parallelism.data_parallel_replicate_degree * _shard_degree(config, world_size)
    per_pass = training.local_batch_size * dp
    if training.global_batch_size > 0 and training.global_batch_size % per_pass:
        near = _either(_around(training.global_batch_size, per_pass))
        yield (
            "training.global_batch_size",
            f"{training.global_batch_size} is not a multiple of local_batch_size {training.local_batch_size} x "
            f"{dp} data-parallel ranks = {per_pass}; {near} would do",
        )


def _check_sequence(config: JobConfig) -> Iterator[Finding]:
    parallel = config.parallelism
    cp, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    # Head-tail balance gives each rank one chunk from either end of the sequence.
    balance = 2 if cp > 1 and parallel.context_parallel_load_balancer == "headtail" else 1
    unit = balance * cp * tp
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, length in lengths.items():
        if length % unit:
            made = " x ".join([*["2"] * (balance == 2), f"cp {cp}", f"tp {tp}"])
            yield (
                key,
                f"{length} is not a multiple of {made} = {unit}; {_either(_around(length, unit))} would do",
            )


def _check_heads(config: JobConfig, model: Any) -> Iterator[Finding]:
    tp, key = config.parallelism.tensor_parallel_degree, "parallelism.tensor_parallel_degree"
    heads, kv_heads = getattr(model, "n_heads", 0), getattr(model, "n_kv_heads", 0)
    if heads % tp:
        near = _fitting(tp, rest=1, world_size=heads, is_open=True)
        yield key, f"{tp} does not divide the model's {heads} heads; {_either(near)} would do"
    elif kv_heads % tp and tp % max(1, kv_heads):
        near = [
            d
            for d in range(1, heads + 1)
            if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)
        ]
        listed = ", ".join(map(str, near))
        yield (
            key,
            f"{tp} neither divides the model's {kv_heads} key/value heads nor is a multiple of them; use one of {listed}",
        )


def _check_stages(config: JobConfig, model: Any) -> Iterator[Finding]:
    parallel, training = config.parallelism, config.training
    pp, size = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_microbatch_size
    if pp == 1:
        return
    if training.local_batch_size % size:
        near = _either(_around(training.local_batch_size, size))
        yield (
            "training.local_batch_size",
            f"{training.local_batch_size} is not a multiple of pipeline_parallel_microbatch_size {size}; {near} would do",
        )
        return
    if getattr(model, "tied_embeddings", False):
        yield (
            "parallelism.pipeline_parallel_degree",
            "the model's output layer is its embedding, and pipeline parallelism would put them on two ranks; use 1, or "
            "model.overrides.tied_embeddings = false",
        )
    try:
        plan_stages(
            getattr(model, "n_layers", 0),
            num_ranks=pp,
            num_microbatches=training.local_batch_size // size,
            schedule=parallel.pipeline_parallel_schedule,
            csv=parallel.pipeline_parallel_schedule_csv,
            layers_per_stage=parallel.pipeline_parallel_layers_per_stage,
            first_less=parallel.pipeline_parallel_first_stage_less_layers,
            last_less=parallel.pipeline_parallel_last_stage_less_layers,
            modules=parallel.module_fqns_per_model_part,
        )
    except (ValueError, OSError) as error:
        yield _blamed(parallel, str(error)), str(error)


def _blamed(parallel: ParallelismSection, problem: str) -> str:
    """The key to change where stages, schedule and batch do not go together."""
    if parallel.pipeline_parallel_schedule_csv:
        return "parallelism.pipeline_parallel_schedule_csv"
    if "microbatch" in problem:
        return "training.local_batch_size"
    if parallel.module_fqns_per_model_part:
        return "parallelism.module_fqns_per_model_part"
    if parallel.pipeline_parallel_layers_per_stage:
        return "parallelism.pipeline_parallel_layers_per_stage"
    return "parallelism.pipeline_parallel_degree"


def _around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` on either side of `value`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
