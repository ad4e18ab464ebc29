"""How a world of ranks is laid out: the degrees of the mesh axes, and the rules that need the number of ranks.

world size = pp x dp_replicate x dp_shard x cp x tp, and a step of global_batch_size sequences is
local_batch_size x data-parallel ranks x accumulation. Every rule says what the numbers come to and which
nearby values would do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

from titan.parallel.schedules import canonical_schedule
from titan.parallel.stages import plan_stages

from .errors import ConfigError, Problem, RuleViolation, UnknownValue, violations_of
from .model import divisors, resolve_model
from .schema import JobConfig

_TRIED = 4096  # values for a fix, on either side of the wrong one: more would take seconds
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


CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_layout(config: JobConfig, *, world_size: int) -> list[Problem]:
    """Everything about the config that does not fit `world_size` ranks."""

    def find(rule: Callable[..., Iterable[RuleViolation]], *arguments: Any) -> list[RuleViolation]:
        return violations_of(lambda config: rule(config, *arguments), config)

    try:
        model = resolve_model(config.model)[0]
    except UnknownValue:
        model = None
    # Where the degrees are wrong anyway, what would follow from them is no help.
    findings = find(_check_world, model, world_size) or [
        *find(_check_batch, world_size),
        *find(_check_sequence),
        *find(_check_stages, model, world_size),
    ]
    findings += find(_check_matrices, model, world_size)
    findings += find(_check_graphs, world_size)
    return [config.source_map.problem(key, message) for key, message in findings]


def _check_graphs(config: JobConfig, world_size: int) -> Iterator[RuleViolation]:
    if world_size > 1 and config.compile.enable and config.compile.mode in CUDA_GRAPHS:
        yield (
            "compile.mode",
            f'"{config.compile.mode}" replays CUDA graphs, which is for one rank only; '
            'use "max-autotune-no-cudagraphs"',
        )


def _degrees(config: JobConfig) -> dict[str, int]:
    return {axis: getattr(config.parallelism, key.rpartition(".")[2]) for axis, key in AXES.items()}


def _shard_degree(config: JobConfig, world_size: int) -> int:
    degrees = _degrees(config)
    shard = degrees.pop("dp_shard")
    return world_size // prod(degrees.values()) if shard == -1 else shard


def _check_world(config: JobConfig, model: Any, world_size: int) -> Iterator[RuleViolation]:
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
            values := _nearest(
                degree,
                [
                    d
                    for d in _fitting(product // degree, world_size=world_size, is_open=is_open)
                    if _suits_model(config, model, axis, d)
                ],
            )
        )
    ]
    ranks = _around(world_size, product) if is_open else [product]
    fixes.append(f"{_either(ranks)} rank{'s' * (ranks != [1])}")
    key = AXES[max(fixed, key=lambda axis: (fixed[axis], axis == "dp_shard"))]
    yield key, f"{why}; {', or '.join(fixes)} would do"


def _fitting(rest: int, *, world_size: int, is_open: bool) -> list[int]:
    """Degrees with which the world factorises, the other fixed degrees multiplying to `rest`."""
    if world_size % rest:
        return []
    share = world_size // rest
    return divisors(share) if is_open else [share]


def _suits_model(config: JobConfig, model: Any, axis: str, degree: int) -> bool:
    """Whether the sequence and the model's matrices could be split with another degree of an axis."""
    changes = {AXES[axis].rpartition(".")[2]: degree}
    parallelism = config.parallelism.model_copy(update=changes)
    changed = config.model_copy(update={"parallelism": parallelism})
    return not [*_check_sequence(changed), *_uneven(model, parallelism.tensor_parallel_degree)]


def _check_batch(config: JobConfig, world_size: int) -> Iterator[RuleViolation]:
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


def _check_sequence(config: JobConfig) -> Iterator[RuleViolation]:
    parallel = config.parallelism
    cp, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    balanced = cp > 1 and parallel.splits_from_both_ends
    unit = (2 if balanced else 1) * cp * tp
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, length in lengths.items():
        if length % unit:
            made = " x ".join([*["2"] * balanced, f"cp {cp}", f"tp {tp}"])
            yield (
                key,
                f"{length} is not a multiple of {made} = {unit}; {_either(_around(length, unit))} would do",
            )


def _check_matrices(config: JobConfig, model: Any, world_size: int) -> Iterator[RuleViolation]:
    """Whether the model's matrices can be split over the tensor-parallel ranks."""
    tp = config.parallelism.tensor_parallel_degree
    reasons = [*_uneven(model, tp)]
    if not reasons:
        return
    heads = getattr(model, "n_heads", tp)
    fitting = [d for d in divisors(heads) if not [*_uneven(model, d)]]
    near = _nearest(tp, _fitting_world(fitting, config, axis="tp", world_size=world_size))
    for reason in reasons:
        yield "parallelism.tensor_parallel_degree", f"{reason}; {_either(near)} would do"


def _uneven(model: Any, tp: int) -> Iterator[str]:
    """Why `tp` ranks cannot share the model's matrices; a family without these fields is not asked."""
    names = ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    heads, kv_heads, width, vocabulary = (getattr(model, name, 0) for name in names)
    if heads % tp:
        yield f"{tp} does not divide the model's {heads} heads"
    elif kv_heads % tp and tp % max(1, kv_heads):
        yield f"{tp} neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
    if width % tp:
        yield f"{tp} does not divide the model's ffn_dim {width}"
    each = -(-vocabulary // tp)
    if vocabulary and (tp - 1) * each >= vocabulary:  # the last part may be shorter, but not empty
        yield f"{tp} ranks cannot share a vocabulary of {vocabulary}, {each} each and some for the last"


def _check_stages(config: JobConfig, model: Any, world_size: int) -> Iterator[RuleViolation]:
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
        canonical_schedule(
            parallel.pipeline_parallel_schedule, csv=parallel.pipeline_parallel_schedule_csv
        )
    except ValueError:
        return  # rules.py tells
    if model is None:
        return  # what there is to be cut is unknown
    layers = getattr(model, "n_layers", 0)
    if not layers:
        yield (
            "parallelism.pipeline_parallel_degree",
            f'the sizes of model family "{config.model.name}" name no n_layers, by which a pipeline is cut; use 1',
        )
    elif problem := _stage_problem(config, layers):
        yield _blame(config, layers, problem, world_size)


def _stage_problem(config: JobConfig, num_layers: int, **changes: int) -> str | None:
    """Why stages, schedule and batch do not go together, with other values for some keys; None: they do."""
    values: dict[str, Any] = {**_stage_values(config), **changes}
    if values["pipeline_parallel_degree"] == 1:
        return None
    try:
        plan_stages(
            num_layers,
            num_ranks=values["pipeline_parallel_degree"],
            num_microbatches=values["local_batch_size"]
            // values["pipeline_parallel_microbatch_size"],
            schedule=values["pipeline_parallel_schedule"],
            csv=values["pipeline_parallel_schedule_csv"],
            layers_per_stage=values["pipeline_parallel_layers_per_stage"],
            first_less=values["pipeline_parallel_first_stage_less_layers"],
            last_less=values["pipeline_parallel_last_stage_less_layers"],
            modules=values["module_fqns_per_model_part"],
        )
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _stage_values(config: JobConfig) -> dict[str, Any]:
    section = config.parallelism
    values = {name: getattr(section, name) for name in type(section).model_fields}
    return values | {"local_batch_size": config.training.local_batch_size}


def _blame(config: JobConfig, num_layers: int, problem: str, world_size: int) -> RuleViolation:
    """The key to change where stages, schedule and batch do not go together, and to what."""
    parallel = config.parallelism
    if parallel.pipeline_parallel_schedule_csv:
        return "parallelism.pipeline_parallel_schedule_csv", problem
    if parallel.module_fqns_per_model_part and "microbatch" not in problem:
        return "parallelism.module_fqns_per_model_part", problem
    key = "parallelism.pipeline_parallel_degree"
    if "microbatch" in problem:
        key = "training.local_batch_size"
    elif "embedding counts" in problem:
        key = "parallelism.pipeline_parallel_first_stage_less_layers"
    elif "output count" in problem:
        key = "parallelism.pipeline_parallel_last_stage_less_layers"
    elif parallel.pipeline_parallel_layers_per_stage:
        key = "parallelism.pipeline_parallel_layers_per_stage"
    fix = _stage_fix(config, num_layers, key, world_size)
    if not fix:  # no one number of that key mends it; fewer ranks do
        key = "parallelism.pipeline_parallel_degree"
        fix = _stage_fix(config, num_layers, key, world_size)
    return key, f"{problem.partition('; ')[0]}; {fix}"


def _stage_fix(config: JobConfig, num_layers: int, key: str, world_size: int) -> str | None:
    """The nearest values of `key` with which stages, schedule and batch go together, if a number can fix it."""
    values, name = _stage_values(config), key.rpartition(".")[2]
    value, pp = values[name], config.parallelism.pipeline_parallel_degree
    size = config.parallelism.pipeline_parallel_microbatch_size
    if not isinstance(value, int):
        return None
    candidates = {
        "local_batch_size": range(size, value + 2 * pp * num_layers * size + 1, size),
        "pipeline_parallel_degree": range(1, pp),
        "pipeline_parallel_layers_per_stage": range(1, 2 * num_layers + 1),
        "pipeline_parallel_first_stage_less_layers": range(value),
        "pipeline_parallel_last_stage_less_layers": range(value),
    }.get(name, range(0))

    def first(numbers: Iterable[int]) -> list[int]:
        fits = (n for n in numbers if not _stage_problem(config, num_layers, **{name: n}))
        return list(islice(fits, 1))

    near = []
    below = candidates[: bisect_left(candidates, value)]
    for side in (below[::-1], candidates[bisect_right(candidates, value) :]):
        tried = list(side[:_TRIED])
        if name == "pipeline_parallel_degree":
            near += first(_fitting_world(tried, config, axis="pp", world_size=world_size))
        near += first(tried) if not near or name != "pipeline_parallel_degree" else []
    if name == "local_batch_size" and near and near[0] > value:
        return f"use {near[0]} or more"
    return f"{_either(near)} would do" if near else None


def _fitting_world(
    degrees: list[int], config: JobConfig, *, axis: str, world_size: int
) -> list[int]:
    """Those of an axis's degrees that divide what the other axes leave of the world; all, where none does."""
    others = _degrees(config) | {axis: 1}
    rest = prod(degree for degree in others.values() if degree != -1)
    return [d for d in degrees if world_size % (rest * d) == 0] or degrees


def _nearest(value: int, fitting: list[int]) -> list[int]:
    """Of ascending numbers, the neighbours of `value`."""
    return [n for n in fitting if n < value][-1:] + [n for n in fitting if n > value][:1]


def _around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` on either side of `value`."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))
