"""Rules of the layout, which depend on the number of ranks.

Every message gives the result of the numbers, and nearby values that are possible.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

from titan.config.errors import (
    ConfigError,
    Problem,
    RuleViolation,
    UnknownValue,
    Violations,
    around,
    divisors,
    either,
    near,
    problems_of,
)
from titan.config.layout import (
    AXES,
    Layout,
    degrees_of,
    layout_of,
    stage_split,
)
from titan.config.model import check_split, is_plug_in, model_title
from titan.config.phases import of_each_phase, phases_of
from titan.config.schema import JobConfig
from titan.parallel.schedules import canonical_schedule
from titan.parallel.traits import UnknownSizes

# Values that are tried for a fix, on either side of the wrong value. More would take seconds.
_MAX_TRIED = 4096


def resolve_layout(config: JobConfig, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks.

    Raises:
        ConfigError: `check_layout` reports problems.
    """
    if problems := check_layout(config, world_size=world_size):
        raise ConfigError(problems)
    return layout_of(config, world_size)


def check_layout(config: JobConfig, *, world_size: int) -> list[Problem]:
    """Return all problems of the config with `world_size` ranks, in any of its phases."""
    return of_each_phase(config, lambda job: _check_layout(job, world_size))


def _check_layout(config: JobConfig, world_size: int) -> list[Problem]:
    try:
        model = config.model.known_sizes
    except UnknownValue:
        model = UnknownSizes()

    def check(*rules: Callable[..., Violations]) -> list[Problem]:
        return [p for rule in rules for p in problems_of(rule, config, model, world_size)]

    # If the degrees themselves are wrong, problems that follow from them are no help.
    problems = check(_check_world) or check(
        _check_batch, _check_sequence, _check_stages, _check_phases
    )
    problems += check(_check_matrices, _check_experts, _check_units)
    # Check this only for a correct layout, since it builds the model.
    return problems or check(_check_plug_in)


def _check_world(config: JobConfig, model: Any, world_size: int) -> Violations:
    degrees = degrees_of(config)
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    product = prod(fixed.values())
    is_open = len(fixed) < len(degrees)  # dp_shard = -1 takes the ranks that the others leave
    if world_size == product or (is_open and world_size % product == 0):
        return
    # Leave out axes of 1, unless all axes are fixed.
    shown = " x ".join(f"{axis} {n}" for axis, n in fixed.items() if n > 1 or not is_open)
    if is_open:
        reason = f"{world_size} ranks / ({shown}) is not whole"
    else:
        reason = f"{shown} = {product}, but there are {world_size} ranks"
    fixes = []
    # Change one axis at a time. The share is the number of ranks that the other axes leave for it.
    for axis, degree in fixed.items():
        share, rest = divmod(world_size, product // degree)
        possible = divisors(share) if is_open else [share]
        fix = near(degree, possible)
        if fix and not rest and (degree > 1 or axis == "dp_shard"):
            fixes.append(f"{AXES[axis].rpartition('.')[2]} = {fix}")
    ranks = around(world_size, product) if is_open else [product]
    fixes.append(f"{either(ranks)} rank{'s' * (ranks != [1])}")
    # The largest degree is the likeliest mistake.
    key = AXES[max(fixed, key=lambda axis: (fixed[axis], axis == "dp_shard"))]
    yield key, f"{reason}; use {', or '.join(fixes)}"


def _check_batch(config: JobConfig, model: Any, world_size: int) -> Violations:
    training = config.training
    dp = layout_of(config, world_size).dp * config.groups.num_groups
    # -1 stands for one forward pass, which always fits.
    per_pass, size = training.local_batch_size * dp, training.global_batch_size
    unit = (
        f"local_batch_size {training.local_batch_size} x {dp} data-parallel ranks = {per_pass}"
    )
    if size > 0 and size % per_pass:
        yield "training.global_batch_size", _not_a_multiple(size, per_pass, unit)


def _check_sequence(config: JobConfig, model: Any, world_size: int) -> Violations:
    parallel, validation = config.parallelism, config.validation
    cp, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    # Head-tail balance cuts the sequence into two chunks for each context-parallel rank.
    chunks = 2 if cp > 1 and parallel.splits_from_both_ends else 1
    unit = f"{'2 x ' * (chunks > 1)}cp {cp} x tp {tp} = {chunks * cp * tp}"
    lengths = {"training.seq_len": config.training.seq_len}
    if validation.enable and validation.seq_len:
        lengths["validation.seq_len"] = validation.seq_len
    positions = model.table_positions
    for key, length in lengths.items():
        if length > positions > 0:
            yield (
                key,
                f"must be at most {positions:,}, the positions that the model has in a table; got {length:,}",
            )
        if length % (chunks * cp * tp):
            yield key, _not_a_multiple(length, chunks * cp * tp, unit)


def _check_phases(config: JobConfig, model: Any, world_size: int) -> Violations:
    """Check the order of phases.

    The step at which a number of tokens is reached depends on the ranks. Only the first mistake is reported, since it shifts
    all later phases.
    """
    for before, phase in pairwise(phases_of(config, world_size=world_size)):
        key, steps = f"phase[{before.number - 1}]", config.training.steps
        if phase.first_step <= before.first_step:
            name = (
                f"phase[{before.number - 2}]" if before.number > 1 else "the job's own settings"
            )
            begin = f"{name}, whose first step is {before.first_step:,}"
            yield key, f"does not begin after {begin}; put the tables in order"
            return
        if phase.first_step > steps:
            end = f"the run ends at training.steps = {steps:,}"
            yield (
                key,
                f"begins at step {phase.first_step:,}, but {end}; raise that, or remove it",
            )
            return


def _check_plug_in(config: JobConfig, model: Any, world_size: int) -> Violations:
    """Check that stages and tensor parallelism leave out no module of another package's model, and that the model can have them.

    Tests check titan's families.
    """
    parallel = config.parallelism
    pp, tp = parallel.pipeline_parallel_degree, parallel.tensor_parallel_degree
    refused = dict(model.refuses or ())
    for name, reason in refused.items():
        sections = ("parallelism", "data", "debug", "checkpoint")
        section = next(s for s in sections if name in type(getattr(config, s)).model_fields)
        value = getattr(getattr(config, section), name)
        if value is True or value > 1:
            yield f"{section}.{name}", reason
    foreign = is_plug_in(config.model.name) or model.refuses is not None
    splits = {"pipeline_parallel_degree", "tensor_parallel_degree"}
    if foreign and model.n_layers and max(pp, tp) > 1 and not splits & refused.keys():
        stages = stage_split(config, num_layers=model.n_layers).modules if pp > 1 else []
        yield from check_split(config.model.name, model, stages=stages, tp=tp)


def _check_matrices(config: JobConfig, model: Any, world_size: int) -> Violations:
    """Check that the tensor-parallel ranks can split the model's matrices."""
    tp = config.parallelism.tensor_parallel_degree
    if reasons := [*_uneven(model, tp)]:
        # Divisors of the heads that also divide everything else.
        possible = [n for n in divisors(model.n_heads or tp) if not [*_uneven(model, n)]]
        for reason in reasons:
            yield (
                "parallelism.tensor_parallel_degree",
                f"{reason}; use {near(tp, possible)}",
            )


def _uneven(model: Any, tp: int) -> Iterator[str]:
    """Yield the reasons why `tp` ranks cannot share the model's matrices."""
    width, vocabulary = model.ffn_dim, model.vocab_size
    # Attention is split by heads, of which layers may have different numbers.
    pairs = {(block.heads, block.kv_heads) for block in model.heads_of_blocks}
    pairs.add((model.n_heads, model.n_kv_heads))
    for number, kv_number in sorted(pairs):
        if number % tp:
            yield f"{tp} does not divide the model's {number} heads"
        # Several ranks may share a key/value head, each with a copy.
        elif kv_number % tp and tp % max(1, kv_number):
            yield f"{tp} neither divides the model's {kv_number} key/value heads nor is a multiple of them"
    if width % tp:
        yield f"{tp} does not divide the model's ffn_dim {width}"
    shared = model.num_shared_experts * model.expert_dim
    if shared % tp:
        yield f"{tp} does not divide the {shared} channels of the model's shared experts"
    # The last rank's part may be shorter, but not empty, since torch cannot look up ids in an empty embedding.
    share = -(-vocabulary // tp)
    if vocabulary and (tp - 1) * share >= vocabulary:
        yield f"{tp} ranks cannot share a vocabulary of {vocabulary}: the last would have no row"


def _check_experts(config: JobConfig, model: Any, world_size: int) -> Violations:
    """Check that expert-parallel ranks can share the experts, and that the other axes have enough ranks for them."""
    parallel, ep = config.parallelism, config.parallelism.expert_parallel_degree
    experts, key = model.num_experts, "parallelism.expert_parallel_degree"
    if ep == 1 or not model.n_layers:
        return
    if not experts:
        flavor = f'"{config.model.name}" {model_title(config.model)}'
        yield key, f"the model {flavor} has no experts to split; use 1, or a model that has"
        return
    if experts % ep:
        fix = near(ep, divisors(experts))
        yield key, f"{ep} does not divide the model's {experts} experts; use {fix}"
    shard = layout_of(config, world_size).dp_shard
    lent = shard * parallel.context_parallel_degree * parallel.tensor_parallel_degree
    if shard > 0 and lent % ep:
        axes = f"dp_shard {shard} x cp {parallel.context_parallel_degree} x tp {parallel.tensor_parallel_degree}"
        fix = near(ep, divisors(lent))
        yield key, f"{ep} does not divide {axes} = {lent}; use {fix}"


def _check_units(config: JobConfig, model: Any, world_size: int) -> Violations:
    parallel = config.parallelism
    shards = layout_of(config, world_size).dp_shard * parallel.context_parallel_degree
    blocks = model.n_layers // parallel.pipeline_parallel_degree
    is_ddp = shards == 1 < parallel.data_parallel_replicate_degree
    for name in ("fsdp_blocks_per_unit", "fsdp_kept_blocks"):
        number = getattr(parallel, name)
        if number > 1 and is_ddp:
            yield f"parallelism.{name}", "DDP gathers no parameters; use 1, or shard them"
        elif number > 1 and model.n_layers and number > blocks:
            each = " on each pipeline rank" if parallel.pipeline_parallel_degree > 1 else ""
            reason = f"{number} are more than the model's {blocks} blocks{each}"
            yield f"parallelism.{name}", f"{reason}; use at most {blocks}"


# ---- pipeline stages ---------------------------------------------------------------------------


def _check_stages(config: JobConfig, model: Any, world_size: int) -> Violations:
    parallel, batch = config.parallelism, config.training.local_batch_size
    size, degree_key = parallel.pipeline_parallel_microbatch_size, AXES["pp"]
    schedule, csv = parallel.pipeline_parallel_schedule, parallel.pipeline_parallel_schedule_csv
    if parallel.pipeline_parallel_degree == 1:
        return
    if batch % size:
        unit = f"pipeline_parallel_microbatch_size {size}"
        yield "training.local_batch_size", _not_a_multiple(batch, size, unit)
        return
    # The shared weight would need a sum of gradients over two ranks after each step.
    if model.tied_embeddings:
        fix = "use 1, or model.overrides.tied_embeddings = false"
        yield degree_key, f"tied embeddings would be on the first and on the last rank; {fix}"
    try:
        canonical_schedule(schedule, csv=csv)
    except ValueError:
        return  # rules.py reports it
    if not model.n_layers:
        return  # the number of layers is unknown
    if problem := _stage_problem(config, model.n_layers):
        yield _stage_violation(config, model.n_layers, problem)


def _stage_problem(config: JobConfig, num_layers: int, **changes: int) -> Exception | None:
    """Return the error of `stage_split` with other values for some keys, or None if stages, schedule and batch fit."""
    degree = changes.get(
        "pipeline_parallel_degree", config.parallelism.pipeline_parallel_degree
    )
    try:
        if degree > 1:
            stage_split(config, num_layers=num_layers, **changes)
    except (ValueError, OSError) as error:
        return error
    return None


def _stage_violation(config: JobConfig, num_layers: int, problem: Exception) -> RuleViolation:
    """Return the key to change, and a message with values that make stages, schedule and batch fit."""
    parallel, prefix = config.parallelism, "pipeline_parallel_"
    pp, size = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_microbatch_size
    kind, reason = getattr(problem, "kind", "file"), str(problem)
    # A file or a list of modules decides everything, so no number could fix it.
    if parallel.pipeline_parallel_schedule_csv:
        return f"parallelism.{prefix}schedule_csv", reason
    if parallel.module_fqns_per_model_part and kind != "microbatches":
        return "parallelism.module_fqns_per_model_part", reason
    name, values = f"{prefix}degree", range(1, pp)
    # Try values up to a microbatch for every possible stage.
    if kind == "microbatches":
        name, value = "local_batch_size", config.training.local_batch_size
        values = range(size, value + 2 * pp * num_layers * size + 1, size)
    elif kind in ("first", "last"):
        name = f"{prefix}{kind}_stage_less_layers"
        values = range(getattr(parallel, name))
    elif parallel.pipeline_parallel_layers_per_stage:
        name, values = f"{prefix}layers_per_stage", range(1, 2 * num_layers + 1)
    fixes = _nearest_fits(config, num_layers, name, values)
    if not fixes:  # no value of that key helps, but fewer pipeline ranks may
        name = f"{prefix}degree"
        fixes = _nearest_fits(config, num_layers, name, range(1, pp))
    section = "training" if name == "local_batch_size" else "parallelism"
    return f"{section}.{name}", f"{reason.partition('; ')[0]}; use {either(fixes)}"


def _nearest_fits(config: JobConfig, num_layers: int, name: str, values: range) -> list[int]:
    """Return the nearest of `values`, below and above the present value, with which the stages fit."""
    # Try the nearest values first on either side, since the first value that fits is the answer.
    today = getattr(config.training if name == "local_batch_size" else config.parallelism, name)
    below = values[: bisect_left(values, today)][-_MAX_TRIED:]
    above = values[bisect_right(values, today) :][:_MAX_TRIED]
    fits = (
        next((n for n in tried if not _stage_problem(config, num_layers, **{name: n})), None)
        for tried in (reversed(below), above)
    )
    return [n for n in fits if n is not None]


def _not_a_multiple(value: int, unit: int, unit_text: str) -> str:
    return f"{value} is not a multiple of {unit_text}; use {either(around(value, unit))}"
