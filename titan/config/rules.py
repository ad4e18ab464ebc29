"""Rules that tie several settings together. Torch-free, all reported at once, each with the nearest fix.

Three sets: `check` needs only the config; `check_layout` (layout.py) the number of ranks as well;
`check_supported` (supported.py) refuses what this version cannot run yet. `check_to_run` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan.observe.hardware import HARDWARE
from titan.parallel.schedules import canonical_schedule, splits_backward

from .layout import CUDA_GRAPHS, Layout, check_layout, resolve_layout
from .model import model_config, resolve_model
from .problems import ConfigError, Finding, Problem, choose
from .quantize import check_converters, lacks_units
from .sections import JobConfig
from .supported import check_supported

__all__ = [
    "Layout",
    "check",
    "check_layout",
    "check_supported",
    "check_to_run",
    "model_config",
    "resolve_layout",
]

KEEP_GROUPS = ("matmul", "attention", "network", "scales")
STACKS_S = 15  # from a step's time limit to the stacks of all ranks; titan/watchdog.py
LOCAL_PRESETS = ("text", "jsonl", "parquet", "shards")
EMBEDDED_PRESETS = ("stdlib", "synthetic")


def check_to_run(config: JobConfig, *, world_size: int) -> Layout:
    """The layout of a run that can start; raises `ConfigError` with everything that is in its way."""
    problems = [
        *check(config),
        *check_supported(config),
        *check_layout(config, world_size=world_size),
    ]
    if problems:
        raise ConfigError(problems)
    return resolve_layout(config, world_size)


def check(config: JobConfig) -> list[Problem]:
    """Everything about the config that is wrong whatever the number of ranks."""
    rules: tuple[Callable[[JobConfig], Iterator[Finding]], ...] = (
        lambda config: iter(resolve_model(config.model)[1]),
        _check_schedule,
        _check_hardware,
        _check_data,
        _check_validation,
        _check_precision,
        _check_optimizer,
        check_converters,
        _check_parallelism,
        _check_recomputation,
        _check_compile,
        _check_checkpoint,
        _check_profiling,
        _check_fault_tolerance,
    )
    findings = [finding for rule in rules for finding in rule(config)]
    return [config.origin.problem(key, message) for key, message in findings]


def _check_schedule(config: JobConfig) -> Iterator[Finding]:
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    name = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    decay = round(total * (schedule.decay_ratio or 0))
    if schedule.warmup_steps > total:
        yield (
            "lr_scheduler.warmup_steps",
            f"{schedule.warmup_steps} steps of warm-up do not fit into {name} = {total}; use {total // 10 or 1}",
        )
    elif schedule.warmup_steps + decay > total:
        room = total - schedule.warmup_steps
        ratio = int(room / total * 1000) / 1000  # rounded down, so that it fits
        yield (
            "lr_scheduler.decay_ratio",
            f"{schedule.decay_ratio} of {name} = {total} is {decay} steps of decay, which with {schedule.warmup_steps} "
            f"of warm-up make {decay + schedule.warmup_steps}; use decay_ratio = {ratio} or warmup_steps = {total - decay}",
        )


def _check_hardware(config: JobConfig) -> Iterator[Finding]:
    name, known = config.hardware.name, {hardware.name: hardware for hardware in HARDWARE}
    if name == "auto":
        return
    if name.lower() not in known:
        yield "hardware.name", f'unknown hardware "{name}"{choose(name, ["auto", *known])}'
    elif problem := lacks_units(config, name, known[name.lower()].peak_flops):
        yield "hardware.name", problem


def _check_data(config: JobConfig) -> Iterator[Finding]:
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


def _check_dataset(section: str, dataset: str, path: str | None) -> Iterator[Finding]:
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


def _check_validation(config: JobConfig) -> Iterator[Finding]:
    validation, fraction = config.validation, config.data.validation_fraction
    if not validation.enable:
        return
    if not validation.dataset and not fraction:
        yield (
            "validation.dataset",
            "validation has no text: set validation.dataset, or data.validation_fraction = 0.01 to keep some "
            "of the training documents for it",
        )
    yield from _check_dataset("validation", validation.dataset, validation.dataset_path)


def _check_precision(config: JobConfig) -> Iterator[Finding]:
    training = config.training
    if (training.mixed_precision_param, training.mixed_precision_reduce) == ("float32", "bfloat16"):
        yield (
            "training.mixed_precision_reduce",
            '"bfloat16" would round gradients that mixed_precision_param = "float32" computes exactly; use "float32"',
        )


def _check_optimizer(config: JobConfig) -> Iterator[Finding]:
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


def _check_parallelism(config: JobConfig) -> Iterator[Finding]:
    parallel = config.parallelism
    schedule = parallel.pipeline_parallel_schedule
    try:
        canonical_schedule(schedule)
    except ValueError as error:
        yield "parallelism.pipeline_parallel_schedule", str(error)
        return
    if parallel.pipeline_parallel_degree > 1 and splits_backward(schedule):
        if parallel.fsdp_reshard_after_forward == "always":
            yield (
                "parallelism.fsdp_reshard_after_forward",
                f'"always" with schedule {schedule}, which splits the backward pass, makes torch compute wrong gradients; '
                'use "default" or "never"',
            )
        if config.compile.enable and "model" in config.compile.components:
            yield (
                "compile.enable",
                f"schedule {schedule} splits the backward pass, which compiled blocks cannot; use false, or 1F1B",
            )
        if config.activation_checkpoint.mode in ("selective", "memory_budget"):
            yield (
                "activation_checkpoint.mode",
                f'"{config.activation_checkpoint.mode}" keeps no graph for schedule {schedule}, which splits the backward '
                'pass; use "full" or "none", or 1F1B',
            )
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


def _check_context(config: JobConfig) -> Iterator[Finding]:
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


def _check_recomputation(config: JobConfig) -> Iterator[Finding]:
    section = config.activation_checkpoint
    option = section.selective_ac_option
    if isinstance(option, str) and option != "op" and not (option.isdecimal() and int(option) > 0):
        yield (
            "activation_checkpoint.selective_ac_option",
            f'expected "op" or a number such as 2, got "{option}"',
        )
    by_op = section.mode == "selective" and option == "op"
    for entry in section.op_keep:
        name, slash, every = entry.partition("/")
        counts = not slash or (every.isdecimal() and int(every))
        if (name not in KEEP_GROUPS and "." not in name) or not counts:
            yield (
                "activation_checkpoint.op_keep",
                f'"{entry}" is no operation such as "aten.mm" and no group{choose(name, KEEP_GROUPS)}; '
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


def _check_compile(config: JobConfig) -> Iterator[Finding]:
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


def _check_checkpoint(config: JobConfig) -> Iterator[Finding]:
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
        if "://" in (url := getattr(section, key) or "") and (reason := _unreachable(url)):
            yield f"checkpoint.{key}", f'"{url}": {reason}'
    parts = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    for name in section.exclude_from_loading:
        if name not in parts:
            yield (
                "checkpoint.exclude_from_loading",
                f'unknown part "{name}"{choose(name, parts)}',
            )


def _unreachable(url: str) -> str:
    """Why fsspec does not know this kind of URL, if so."""
    from fsspec import get_filesystem_class  # only for those who have a URL

    try:
        get_filesystem_class(url.split("://", 1)[0])
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def _check_profiling(config: JobConfig) -> Iterator[Finding]:
    section, steps = config.profiling, config.training.steps
    if not section.enable_profiling:
        return
    needed = section.profiler_warmup + section.profiler_active
    if section.profile_freq < needed:
        yield (
            "profiling.profile_freq",
            f"{section.profile_freq} steps cannot hold profiler_warmup = {section.profiler_warmup} and "
            f"profiler_active = {section.profiler_active}; use {needed} or more",
        )
    elif section.profile_freq > steps:
        yield (
            "profiling.profile_freq",
            f"{section.profile_freq}, but the run ends at training.steps = {steps}: no trace would be written; "
            f"use {max(needed, steps)}"
            + (f" and training.steps = {needed}" if steps < needed else ""),
        )


def _check_fault_tolerance(config: JobConfig) -> Iterator[Finding]:
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
