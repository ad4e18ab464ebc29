"""Rules that tie several settings together. Torch-free, all reported at once, each with the nearest fix.

Four sets: `check` needs only the config; `check_layout` (layout.py) the number of ranks as well;
`check_supported` (supported.py) refuses what this version cannot run yet; `check_machine` (machine.py) asks the machine
that is to run the job. `check_to_run` runs them all, `load_to_run` from a command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titan.data import DataError
from titan.data.sources import resolve_sources
from titan.observe.hardware import HARDWARE
from titan.optim.schedule import phases
from titan.parallel.schedules import canonical_schedule, splits_backward
from titan.parallel.stages import split_modules

from .base import LIMIT, Section
from .environment import check_environment
from .errors import (
    ConfigError,
    KeyPath,
    Problem,
    RuleViolation,
    choose,
    did_you_mean,
    key_text,
    violations_of,
)
from .layout import CUDA_GRAPHS, Layout, check_layout, resolve_layout
from .load import load_from_argv, print_warnings
from .model import family, model_config, resolve_model
from .quantize import check_converters, lacks_units
from .schema import HuggingFaceSource, JobConfig, SyntheticSource
from .unsupported import check_supported

__all__ = [
    "Layout",
    "advise",
    "check",
    "check_layout",
    "check_supported",
    "check_to_run",
    "load_to_run",
    "model_config",
    "resolve_layout",
]

KEEP_GROUPS = ("matmul", "attention", "network", "scales")
STACKS_S = 15  # from a step's time limit to the stacks of all ranks; titan/health/watchdog.py
LOCAL_PRESETS = ("text", "jsonl", "parquet", "shards")
EMBEDDED_PRESETS = ("stdlib", "synthetic")


def load_to_run(
    argv: Sequence[str],
    *,
    world_size: int | None,
    options: Sequence[str] = (),
    here: bool = False,
    warn: bool = True,
) -> tuple[JobConfig, Layout]:
    """Return the job of a command line and its layout; raises `ConfigError` with everything that is in its way, whether a
    line is misspelt, a rule is broken, or (here) this machine or its environment lacks something.

    world_size: None, as many ranks as torchrun's environment names. options: as in `load_from_argv`. warn: False, for one that starts
    another process with the same job, which warns.
    """
    problems = check_environment(os.environ) if here else []
    if world_size is None and not problems:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        config = load_from_argv(argv, options=options, warn=False)
        warnings = config.source_map.warnings
    except ConfigError as error:
        problems, config, warnings = problems + error.problems, error.partial, []
    if config is not None:
        problems += _problems(config, world_size, here=here)
    if warn or problems:
        print_warnings(warnings)
    if problems or config is None or world_size is None:
        raise ConfigError(problems)
    if warn:
        print_warnings(advise(config))
    return config, resolve_layout(config, world_size)


def check_to_run(config: JobConfig, *, world_size: int) -> Layout:
    """Return the layout of a run that can start; raises `ConfigError` with everything in the job that is in its way."""
    if problems := _problems(config, world_size, here=False):
        raise ConfigError(problems)
    return resolve_layout(config, world_size)


def _problems(config: JobConfig, world_size: int | None, *, here: bool) -> list[Problem]:
    problems = [*check(config), *check_supported(config)]
    if world_size is not None:
        problems += check_layout(config, world_size=world_size)
    if here:
        from .machine import check_machine  # reads tokenizers, which imports numpy

        problems += check_machine(config)
    return problems


def check(config: JobConfig) -> list[Problem]:
    """Everything about the config that is wrong whatever the number of ranks."""
    rules: tuple[Callable[[JobConfig], Iterator[RuleViolation]], ...] = (
        _check_text,
        lambda config: iter(resolve_model(config.model)[1]),
        _check_hardware,
        _check_data,
        _check_validation,
        _check_sizes,
        _check_precision,
        _check_optimizer,
        check_converters,
        _check_parallelism,
        _check_modules,
        _check_recomputation,
        _check_compile,
        _check_checkpoint,
        _check_profiling,
        _check_fault_tolerance,
    )
    return [
        config.source_map.problem(*finding)
        for rule in rules
        for finding in violations_of(rule, config)
    ]


def _check_text(part: Any, path: KeyPath = ()) -> Iterator[RuleViolation]:
    """No file can have a name with a null character in it, and no file can hold text with half a surrogate pair."""
    if isinstance(part, Section):
        part = {name: value for name, value in part if name in type(part).model_fields}
    if isinstance(part, str) and ("\0" in part or part != part.encode(errors="replace").decode()):
        yield key_text(path), f"holds a character that no file can: {ascii(part)[:60]}"
    items = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list)
        else ()
    )
    for name, value in items:
        yield from _check_text(value, (*path, name))


def advise(config: JobConfig) -> list[str]:
    """Return warnings about settings that a run goes on without: most jobs that are cut short with --training.steps have some."""
    findings = [*_shortened(config), *_untraced(config)]
    return [str(config.source_map.problem(key, message)) for key, message in findings]


def _shortened(config: JobConfig) -> Iterator[RuleViolation]:
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    name = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    warmup, decay = phases(schedule, total_steps=config.training.steps)
    if warmup < schedule.warmup_steps:
        yield (
            "lr_scheduler.warmup_steps",
            f"{schedule.warmup_steps} steps of warm-up do not fit into {name} = {total}, and are cut to {warmup}",
        )
    wanted = round(total * (schedule.decay_ratio or 0))
    if decay < wanted:
        yield (
            "lr_scheduler.decay_ratio",
            f"{schedule.decay_ratio} of {name} = {total} is {wanted} steps of decay, which {warmup} of warm-up leave no room for: "
            f"they are cut to {decay}",
        )


def _untraced(config: JobConfig) -> Iterator[RuleViolation]:
    profiling, steps = config.profiling, config.training.steps
    if profiling.enable_profiling and profiling.profile_freq > steps:
        yield (
            "profiling.profile_freq",
            f"{profiling.profile_freq}, but the run ends at training.steps = {steps}: no trace will be written",
        )


def _check_hardware(config: JobConfig) -> Iterator[RuleViolation]:
    name, known = config.hardware.name, {hardware.name: hardware for hardware in HARDWARE}
    if name == "auto":
        return
    if name.lower() not in known:
        yield "hardware.name", f'unknown hardware "{name}"{choose(name, ["auto", *known])}'
    elif problem := lacks_units(config, name, known[name.lower()].peak_flops):
        yield "hardware.name", problem


def _check_data(config: JobConfig) -> Iterator[RuleViolation]:
    training, data = config.training, config.data
    default = type(training).model_fields["dataset"].default
    if data.sources and training.dataset != default:
        yield (
            "training.dataset",
            f'"{training.dataset}" and [[data.sources]] both say what to train on; remove one',
        )
    if config.tokenizer.path and config.tokenizer.name == "bytes":
        yield "tokenizer.path", 'tokenizer "bytes" reads no file; set tokenizer.name = "auto"'
    yield from _check_dataset("training", training.dataset, training.dataset_path)
    if data.reset_positions and not data.document_mask:
        yield (
            "data.reset_positions",
            "without document_mask a token would attend to others at its own position; "
            "set document_mask = true, or reset_positions = false",
        )


def _check_dataset(section: str, dataset: str, path: str | None) -> Iterator[RuleViolation]:
    if dataset in LOCAL_PRESETS and not path:
        yield (
            f"{section}.dataset_path",
            f'missing: dataset "{dataset}" needs it; set {section}.dataset_path to a file, folder or glob',
        )
    if path and dataset in EMBEDDED_PRESETS:
        yield (
            f"{section}.dataset_path",
            f'dataset "{dataset}" reads no files; set {section}.dataset to one of {", ".join(LOCAL_PRESETS)}, '
            "or remove dataset_path",
        )
        return
    if dataset not in LOCAL_PRESETS:
        try:
            resolve_sources(dataset)
        except DataError as error:
            yield f"{section}.dataset", str(error)


def _check_validation(config: JobConfig) -> Iterator[RuleViolation]:
    validation, fraction = config.validation, config.data.validation_fraction
    if not validation.enable:
        return
    sources = config.data.sources
    kinds = {source.type for source in sources} if sources else {config.training.dataset}
    # Shards were split when they were prepared.
    if not validation.dataset and not fraction and kinds != {"shards"}:
        yield (
            "validation.dataset",
            "validation has no text: set validation.dataset, or data.validation_fraction = 0.01 to keep some "
            "of the training documents for it",
        )
    sources: Sequence[object] = config.data.sources
    if validation.dataset:
        findings = [*_check_dataset("validation", validation.dataset, validation.dataset_path)]
        yield from findings
        if not findings:
            sources = resolve_sources(validation.dataset, dataset_path=validation.dataset_path)
    endless = [s for s in sources if isinstance(s, (HuggingFaceSource, SyntheticSource))]
    if validation.steps == -1 and any(getattr(source, "streaming", True) for source in endless):
        yield (
            "validation.steps",
            "-1 wants the whole text, and a stream has no end; give a number",
        )


def _check_sizes(config: JobConfig) -> Iterator[RuleViolation]:
    training, parallel = config.training, config.parallelism
    sequences = training.local_batch_size
    if parallel.pipeline_parallel_degree > 1:
        sequences = parallel.pipeline_parallel_microbatch_size
    tokens = sequences * training.seq_len // parallel.context_parallel_degree
    if tokens > LIMIT:
        yield (
            "training.seq_len",
            f"{sequences:,} sequences of {training.seq_len:,} are {tokens:,} tokens in one forward pass, more than the "
            f"{LIMIT:,} that kernels can count",
        )


def _check_precision(config: JobConfig) -> Iterator[RuleViolation]:
    training = config.training
    if (training.mixed_precision_param, training.mixed_precision_reduce) == ("float32", "bfloat16"):
        yield (
            "training.mixed_precision_reduce",
            '"bfloat16" would round gradients that mixed_precision_param = "float32" computes exactly; use "float32"',
        )


def _check_optimizer(config: JobConfig) -> Iterator[RuleViolation]:
    optimizer, training, parallel = config.optimizer, config.training, config.parallelism
    if getattr(optimizer, "stochastic_rounding", False) and training.dtype != "bfloat16":
        yield (
            "optimizer.stochastic_rounding",
            f'is for bf16 weights, and training.dtype = "{training.dtype}" keeps every update; use false, or dtype = "bfloat16"',
        )
    if optimizer.name == "AdamW8bit" and 8 % parallel.tensor_parallel_degree:
        yield (
            "optimizer.name",
            f'"AdamW8bit" quantizes blocks of an eighth of a row or less, which tensor_parallel_degree = '
            f'{parallel.tensor_parallel_degree} would cut; use a degree of 1, 2, 4 or 8, or "AdamW" with state_dtype = "bfloat16"',
        )
    if not getattr(optimizer, "early_step_in_backward", False):
        return
    key = "optimizer.early_step_in_backward"
    if training.max_norm:
        yield (
            key,
            f"updates parameters before the global norm is known by which training.max_norm = {training.max_norm:g} "
            "would clip; set max_norm = 0 (the norm is still reported), or use false",
        )
    if parallel.pipeline_parallel_degree > 1:
        yield (
            key,
            "would update a stage's parameters while later microbatches still need them; "
            "use false, or pipeline_parallel_degree = 1",
        )
    if training.enable_cpu_offload:
        yield (
            key,
            "would read gradients that may still be on their way to the host; use false, or training.enable_cpu_offload = false",
        )
    if config.metrics.log_layer_norms_every_n_steps:
        yield (
            key,
            "uses up each gradient before metrics.log_layer_norms_every_n_steps could measure it; use false, or 0",
        )
    if optimizer.name == "Muon":
        yield (
            key,
            '"Muon" shares whole batches of matrices out over the ranks, so it needs all of their gradients; '
            'use false, or name = "AdamW"',
        )


def _check_parallelism(config: JobConfig) -> Iterator[RuleViolation]:
    parallel = config.parallelism
    yield from _check_schedule(config)
    if parallel.enable_async_tensor_parallel:
        if not (config.compile.enable and "model" in config.compile.components):
            yield (
                "parallelism.enable_async_tensor_parallel",
                "is done by the compiler; set compile.enable = true with the component model",
            )
        if parallel.tensor_parallel_degree == 1:
            yield (
                "parallelism.enable_async_tensor_parallel",
                "has no effect with tensor_parallel_degree = 1; set that to 2 or more, or this to false",
            )
    yield from _check_context(config)


def _check_schedule(config: JobConfig) -> Iterator[RuleViolation]:
    """What the order of actions rules out, whether it is a schedule's by name or that of a file."""
    parallel, ac = config.parallelism, config.activation_checkpoint
    name, file = parallel.pipeline_parallel_schedule, parallel.pipeline_parallel_schedule_csv
    try:
        canonical_schedule(name, csv=file)
    except ValueError as error:
        yield "parallelism.pipeline_parallel_schedule", str(error)
        return
    if parallel.pipeline_parallel_degree == 1:
        return
    try:
        if not splits_backward(name, csv=file):
            return
    except ValueError:
        return  # layout.py tells what is wrong with the file
    schedule = f"{file or name}, which splits the backward pass"
    if parallel.fsdp_reshard_after_forward == "always":
        yield (
            "parallelism.fsdp_reshard_after_forward",
            f'"always" with schedule {schedule}, makes torch compute wrong gradients; use "default" or "never"',
        )
    if config.compile.enable and "model" in config.compile.components:
        yield (
            "compile.enable",
            f"compiled blocks cannot follow schedule {schedule}; use false, or schedule 1F1B",
        )
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            "activation_checkpoint.selective_ac_option",
            f'"op" keeps no graph for schedule {schedule}; use a number such as 2, mode = "full", or schedule 1F1B',
        )
    if ac.mode == "memory_budget":
        yield (
            "activation_checkpoint.mode",
            f'"memory_budget" keeps no graph for schedule {schedule}; use "full" or "none", or schedule 1F1B',
        )


def _check_modules(config: JobConfig) -> Iterator[RuleViolation]:
    """Whether the stages that a job names hold each module once. A plug-in's modules may have other names, which torch knows."""
    parallel, model = config.parallelism, resolve_model(config.model)[0]
    stages, layers = parallel.module_fqns_per_model_part, getattr(model, "n_layers", 0)
    if not stages or not layers or parallel.pipeline_parallel_degree == 1:
        return
    if not family(config.model.name).__name__.startswith("titan.models."):
        return
    key = "parallelism.module_fqns_per_model_part"
    [modules] = split_modules(layers, num_stages=1, first_less=0, last_less=0)
    named = [name for names in stages for name in names]
    for name in dict.fromkeys(named):
        if name not in modules:
            yield key, f"the model has no module '{name}'{did_you_mean(name, modules)}"
        elif named.count(name) > 1:
            yield key, f"module '{name}' is named {named.count(name)} times; put it into one stage"
    if missing := [name for name in modules if name not in named]:
        listed = ", ".join(missing[:5]) + f" and {len(missing) - 5} more" * (len(missing) > 5)
        yield key, f"{listed} would be in no stage; put each module of the model into one"


def _check_context(config: JobConfig) -> Iterator[RuleViolation]:
    parallel, key = config.parallelism, "parallelism.context_parallel_rotate_method"
    if parallel.context_parallel_degree == 1:
        return
    method = parallel.context_parallel_rotate_method
    if parallel.context_parallel_load_balancer == "ptrr":
        yield (
            "parallelism.context_parallel_load_balancer",
            '"ptrr" balances FlexAttention\'s block masks, which are not used here; use "headtail"',
        )
    model = resolve_model(config.model)[0]
    # Heads that do not divide by tp are check_layout's to tell.
    heads, rest = divmod(getattr(model, "n_heads", 0), parallel.tensor_parallel_degree)
    uneven = not rest and heads % parallel.context_parallel_degree
    masked = config.data.document_mask
    or_ulysses, or_ring = "" if uneven else ' or "ulysses"', "" if masked else ' or "ring"'
    if method in ("ring", "alltoall") and masked:
        yield (
            key,
            f'"{method}" has no document mask; use "allgather"{or_ulysses}, '
            "or data.document_mask = false",
        )
    if method == "ulysses" and uneven:
        yield (
            key,
            f'"ulysses" shares each rank\'s {heads} query heads among {parallel.context_parallel_degree} context-parallel '
            f'ranks, which does not come out even; use "allgather"{or_ring}',
        )


def _check_recomputation(config: JobConfig) -> Iterator[RuleViolation]:
    section = config.activation_checkpoint
    option = section.selective_ac_option
    if isinstance(option, str) and option != "op" and not _is_count(option):
        yield (
            "activation_checkpoint.selective_ac_option",
            f'expected "op" or a number such as 2, got "{option}"',
        )
    model = resolve_model(config.model)[0]
    layers, every = getattr(model, "n_layers", 0), str(option)
    if section.mode == "selective" and layers and _is_count(every) and int(every) > layers:
        yield (
            "activation_checkpoint.selective_ac_option",
            f"{every}: no block would be recomputed, as the model has {layers} layers; use {layers} or less, or "
            'mode = "none"',
        )
    by_op = section.mode == "selective" and option == "op"
    for entry in section.op_keep:
        name, slash, every = entry.partition("/")
        counts = not slash or _is_count(every)
        if (name not in KEEP_GROUPS and "." not in name) or not counts:
            yield (
                "activation_checkpoint.op_keep",
                f'"{entry[:80]}" is no operation such as "aten.mm" and no group{choose(name, KEEP_GROUPS)}; '
                'either may end in "/2"',
            )
    if by_op and not section.op_keep and not section.op_keep_modules:
        yield "activation_checkpoint.op_keep", 'keeps nothing; use mode = "full"'
    if section.op_keep_modules and not by_op:
        yield (
            "activation_checkpoint.op_keep_modules",
            'needs mode = "selective" and selective_ac_option = "op"; set these, or remove it',
        )
    if section.cpu_offload and by_op:
        yield (
            "activation_checkpoint.cpu_offload",
            'cannot move what mode = "selective" with "op" keeps; use mode = "full" or "none"',
        )
    if section.mode == "memory_budget" and not (
        config.compile.enable and "model" in config.compile.components
    ):
        yield (
            "activation_checkpoint.mode",
            '"memory_budget" is kept by the compiler; set compile.enable = true with the component model, '
            'or use "selective" or "full"',
        )


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) is not None


def _check_compile(config: JobConfig) -> Iterator[RuleViolation]:
    mode = config.compile.mode
    if mode == "default" or not config.compile.enable:
        return
    if config.compile.backend != "inductor":
        yield (
            "compile.mode",
            f'is a mode of inductor; use "default" with "{config.compile.backend}"',
        )
    if mode not in CUDA_GRAPHS:
        return
    # A graph replays on fixed addresses: gathered or cast parameters get new ones in each step.
    training = config.training
    without = 'use "max-autotune-no-cudagraphs" or "default"'
    if training.dtype != training.mixed_precision_param:
        yield (
            "compile.mode",
            f'"{mode}" replays CUDA graphs, which parameters cast from {training.dtype} to '
            f"{training.mixed_precision_param} in each step rule out; {without}",
        )
    if config.activation_checkpoint.mode != "none" or config.activation_checkpoint.cpu_offload:
        yield (
            "compile.mode",
            f'"{mode}" replays CUDA graphs, whose memory recomputation would overwrite; {without}',
        )


def _check_checkpoint(config: JobConfig) -> Iterator[RuleViolation]:
    section = config.checkpoint
    if section.initial_load_in_hf and not (
        section.initial_load_path or config.model.hf_assets_path
    ):
        yield (
            "checkpoint.initial_load_in_hf",
            "there is no folder to load from; set checkpoint.initial_load_path or model.hf_assets_path",
        )
    if section.initial_load_in_hf and not section.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only",
            "a Hugging Face folder holds weights only; set initial_load_model_only = true",
        )
    if section.last_save_in_hf and (section.load_only or not section.enable):
        off = "load_only = false" if section.load_only else "enable = true"
        yield "checkpoint.last_save_in_hf", f"nothing is saved in this job; set checkpoint.{off}"
    every = section.keep_every_n_steps
    if every % section.interval:
        yield (
            "checkpoint.keep_every_n_steps",
            f"is no multiple of interval = {section.interval}, so that most of these steps are never saved; use "
            f"{max(1, round(every / section.interval)) * section.interval}, or 0",
        )
    if section.create_seed_checkpoint and (section.load_only or not section.enable):
        yield (
            "checkpoint.create_seed_checkpoint",
            "is a save, which enable = false and load_only = true forbid; use false",
        )
    for key in ("folder", "initial_load_path"):
        if "://" in (url := getattr(section, key) or ""):
            from titan.checkpoint.storage import unusable  # only for those who have a URL

            if reason := unusable(url):
                yield f"checkpoint.{key}", f'"{url}": {reason}'
    parts = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    for name in section.exclude_from_loading:
        if name not in parts:
            yield (
                "checkpoint.exclude_from_loading",
                f'unknown part "{name}"{choose(name, parts)}',
            )


def _check_profiling(config: JobConfig) -> Iterator[RuleViolation]:
    section = config.profiling
    if not section.enable_profiling:
        return
    needed = section.profiler_warmup + section.profiler_active
    if section.profile_freq < needed:
        yield (
            "profiling.profile_freq",
            f"{section.profile_freq} steps cannot hold profiler_warmup = {section.profiler_warmup} and "
            f"profiler_active = {section.profiler_active}; use {needed} or more",
        )


def _check_fault_tolerance(config: JobConfig) -> Iterator[RuleViolation]:
    section = config.fault_tolerance
    for key, action in (("on_nonfinite", section.on_nonfinite), ("on_spike", section.on_spike)):
        if action == "rewind" and (not config.checkpoint.enable or config.checkpoint.load_only):
            yield (
                f"fault_tolerance.{key}",
                '"rewind" needs checkpoints to go back to: set checkpoint.enable = true, and load_only = false',
            )
        if action in ("skip", "rewind") and getattr(
            config.optimizer, "early_step_in_backward", False
        ):
            yield (
                f"fault_tolerance.{key}",
                f'"{action}" cannot undo what optimizer.early_step_in_backward updates before the loss is known; use "stop"',
            )
    if section.spike_min_steps > section.spike_window:
        yield (
            "fault_tolerance.spike_min_steps",
            f"{section.spike_min_steps} losses do not fit spike_window = {section.spike_window}: nothing would ever be a spike; "
            f"use {section.spike_window} or less",
        )
    limit = config.fault_tolerance.step_timeout_seconds
    collective = config.comm.train_timeout_seconds
    if limit and limit + STACKS_S > collective:
        lower = f"use {collective - STACKS_S}, or raise" if collective > STACKS_S else "raise"
        yield (
            "fault_tolerance.step_timeout_seconds",
            f"comm.train_timeout_seconds = {collective} ends the ranks before their stacks are written; {lower} "
            f"comm.train_timeout_seconds to {limit + STACKS_S}",
        )
