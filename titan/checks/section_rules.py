"""Rules that need only the config, one function for each section. rules.py runs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from titan.base.hardware import HARDWARE
from titan.checks.choice_rules import check_choices
from titan.checks.expert_rules import check_experts
from titan.checks.phase_rules import check_phases, has_conversations
from titan.checks.stage_rules import check_modules
from titan.config.base import LIMIT, LOCAL_PRESETS, Section
from titan.config.errors import KeyPath, Violations, choose, key_text
from titan.config.loss import check_loss
from titan.config.model import check_freeze
from titan.config.phases import longest_sequence
from titan.config.quantize import check_converters, eight_bit_sections, lacks_units
from titan.config.schema import (
    ActivationCheckpointSection,
    HuggingFaceSource,
    JobConfig,
    SyntheticSource,
)
from titan.config.task import check_task, data_keys, predicts_tokens, reads_text
from titan.data import DataError
from titan.data.sources import resolve_sources
from titan.parallel.sac_save_list import SaveListError, parse_blocks, parse_rule
from titan.parallel.schedules import canonical_schedule

STACKS_S = 15  # from a step's time limit until the stacks of all ranks are written; titan/ops
EMBEDDED_PRESETS = ("stdlib", "synthetic")
# Parts of a checkpoint that can be left out when it is loaded.
STATE_PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state", "tokenizer")


def _text(part: Any, path: KeyPath = ()) -> Violations:
    """Refuse characters that no file can hold.

    These are null characters, which no file name may hold, and half surrogate pairs, which no file
    can store.
    """
    if isinstance(part, Section):
        # Iterating a section skips forgotten values.
        part = {name: value for name, value in part if name in type(part).model_fields}
    if isinstance(part, str) and re.search("[\0\ud800-\udfff]", part):
        yield key_text(path), f"holds a character that no file can hold: {ascii(part)[:60]}"
    if isinstance(part, list):
        part = dict(enumerate(part))
    for name, value in part.items() if isinstance(part, dict) else ():
        yield from _text(value, (*path, name))


def _loss(config: JobConfig) -> Violations:
    if predicts_tokens(config):
        yield from check_loss(config)
    elif config.loss.name != type(config.loss).model_fields["name"].default:
        yield "name", "has no effect: the task of this model has its own loss; remove it"


def _hardware(config: JobConfig) -> Violations:
    name, known = config.hardware.name, {hardware.name: hardware for hardware in HARDWARE}
    if name == "auto":
        return  # recognized when the run starts
    if name.lower() not in known:
        yield "name", f'unknown hardware "{name}"{choose(name, ["auto", *known])}'
    elif problem := lacks_units(config, name, known[name.lower()].peak_flops):
        yield "name", problem


def _data(config: JobConfig) -> Violations:
    training, data = config.training, config.data
    if not reads_text(config):
        for key in data.model_dump(exclude_defaults=True, exclude={*data_keys(config)}):
            yield key, "has no effect: the task of this model reads no text; remove it"
        return
    # [[data.sources]] replaces the default dataset silently, but not a dataset that the job names.
    if data.sources and training.dataset != type(training).model_fields["dataset"].default:
        yield (
            "training.dataset",
            "[[data.sources]] also says what to train on; remove one of them",
        )
    # The path would be ignored, so the job probably means another tokenizer.
    if config.tokenizer.path and config.tokenizer.name == "bytes":
        yield "tokenizer.path", 'tokenizer "bytes" reads no file; set tokenizer.name = "auto"'
    yield from _dataset("training", training.dataset, training.dataset_path)
    if has_conversations(config) and not data.document_mask:
        yield "document_mask", "conversations share sequences; set document_mask = true"
    if data.reset_positions and not data.document_mask:
        # A token would attend to tokens of other documents with the same position.
        yield "reset_positions", "needs document_mask = true; set that, or use false"


def _dataset(section: str, dataset: str, path: str | None) -> Violations:
    key = f"{section}.dataset_path"
    if dataset in LOCAL_PRESETS:
        if not path:
            yield (
                key,
                f'missing: dataset "{dataset}" needs it; set it to a file, folder or glob',
            )
    elif path and dataset in EMBEDDED_PRESETS:
        fix = f"set {section}.dataset to one of {', '.join(LOCAL_PRESETS)}, or remove this key"
        yield key, f'dataset "{dataset}" reads no files; {fix}'
    else:
        # A preset, or a name at the hub. This reads nothing.
        try:
            resolve_sources(dataset)
        except DataError as error:
            yield f"{section}.dataset", str(error)


def _validation(config: JobConfig) -> Violations:
    validation, sources = config.validation, config.data.sources
    if not validation.enable or not reads_text(config):
        return
    kinds = {source.type for source in sources} if sources else {config.training.dataset}
    # Shards were split when they were prepared.
    if not validation.dataset and not config.data.validation_fraction and kinds != {"shards"}:
        yield "dataset", "missing: set it, or data.validation_fraction = 0.01"
    if validation.dataset:
        violations = [*_dataset("validation", validation.dataset, validation.dataset_path)]
        yield from violations
        if not violations:
            sources = resolve_sources(validation.dataset, dataset_path=validation.dataset_path)
    # Streams and synthetic text never end, and validation on all of them would hang.
    endless = [s for s in sources if isinstance(s, HuggingFaceSource | SyntheticSource)]
    if validation.steps == -1 and any(
        isinstance(source, SyntheticSource) or source.streaming for source in endless
    ):
        yield "steps", "-1 reads the whole text, and a stream has no end; give a number"


def _training(config: JobConfig) -> Violations:
    training, parallel = config.training, config.parallelism
    sequences = training.local_batch_size
    if parallel.pipeline_parallel_degree > 1:
        sequences = (
            parallel.pipeline_parallel_microbatch_size
        )  # a forward pass has one microbatch
    tokens = sequences * training.seq_len // parallel.context_parallel_degree
    if tokens > LIMIT:
        # torch's kernels index with 32 bits.
        size = f"{sequences:,} sequences of {training.seq_len:,} are {tokens:,} tokens"
        yield "seq_len", f"{size} in one forward pass; use at most {LIMIT:,}"
    dtype = training.compute_dtype
    if dtype != "bfloat16" and training.mixed_precision_reduce == "bfloat16":
        yield "mixed_precision_reduce", f'would round {dtype} gradients; use "float32"'
    if dtype != "float16":
        return
    # The requirement with its reason, and whether the job meets it.
    needs = {
        'training.dtype = "float32", as float16 cannot hold small updates': (
            training.dtype == "float32"
        ),
        "optimizer.early_step_in_backward = false, as a step may have to be skipped": (
            not config.steps_in_backward
        ),
        "a model without converters to 8 bits, whose hardware has bfloat16": (
            not eight_bit_sections(config)
        ),
    }
    for need, has in needs.items():
        if not has:
            yield "mixed_precision_param", f'"float16" needs {need}; or use "bfloat16"'


def _optimizer(config: JobConfig) -> Violations:
    optimizer, tp = config.optimizer, config.parallelism.tensor_parallel_degree
    # fp32 weights keep every update, so there is nothing to round.
    if config.any_optimizer.stochastic_rounding and config.training.dtype != "bfloat16":
        yield "stochastic_rounding", 'needs training.dtype = "bfloat16"; set that, or use false'
    if optimizer.name == "AdamW8bit" and 8 % tp:
        # It quantizes blocks of at most an eighth of a row. Other degrees would cut them.
        yield "name", 'needs a tensor_parallel_degree of 1, 2, 4 or 8; or use name = "AdamW"'


def _early_step(config: JobConfig) -> Violations:
    if not config.steps_in_backward:
        return
    training = config.training
    # Requirement with its reason, and whether the job meets it.
    needs = {
        "training.max_norm = 0, as no norm is known yet to clip by": not training.max_norm,
        "pipeline_parallel_degree = 1, as later microbatches still need the old weights": (
            config.parallelism.pipeline_parallel_degree == 1
        ),
        "training.enable_cpu_offload = false, as gradients may not have reached the host": (
            not training.enable_cpu_offload
        ),
        'name = "AdamW", as "Muon" exchanges the gradients of many matrices': (
            config.optimizer.name != "Muon"
        ),
    }
    for need, has in needs.items():
        if not has:
            yield "early_step_in_backward", f"needs {need}; set that, or use false"


def _kept_blocks(config: JobConfig) -> Violations:
    parallel = config.parallelism
    policy = parallel.fsdp_reshard_after_forward
    keeps_all = {"never": True, "always": False}.get(
        policy, parallel.pipeline_parallel_degree > 1
    )
    if parallel.fsdp_kept_blocks > 1 and keeps_all:
        reason = f'fsdp_reshard_after_forward = "{policy}" keeps all blocks'
        yield "fsdp_kept_blocks", f'{reason}; use 1, or "always"'


def _compiles_model(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _schedule(config: JobConfig) -> Violations:
    parallel = config.parallelism
    try:
        canonical_schedule(
            parallel.pipeline_parallel_schedule, csv=parallel.pipeline_parallel_schedule_csv
        )
    except ValueError as error:
        yield "pipeline_parallel_schedule", str(error)


def _tensor(config: JobConfig) -> Violations:
    if config.parallelism.enable_async_tensor_parallel:
        key = "enable_async_tensor_parallel"
        # In torch it is a pass of inductor over the graph of a block.
        if not _compiles_model(config):
            yield (
                key,
                "is done by the compiler; set compile.enable = true with the component model",
            )
        if config.parallelism.tensor_parallel_degree == 1:
            yield key, "needs tensor_parallel_degree = 2 or more; set that, or use false"


def _context(config: JobConfig) -> Violations:
    parallel, key = config.parallelism, "context_parallel_rotate_method"
    cp, method = parallel.context_parallel_degree, parallel.context_parallel_rotate_method
    if cp == 1:
        return
    if parallel.context_parallel_load_balancer == "ptrr":
        yield "context_parallel_load_balancer", '"ptrr" is for block masks; use "headtail"'
    model = config.model.known_sizes
    pieces = cp * (2 if parallel.splits_from_both_ends else 1)
    if config.training.seq_len < pieces * model.reach:
        what = f"each of {pieces} pieces of a sequence needs {model.reach} tokens for short convolutions"
        fix = f"set training.seq_len = {pieces * model.reach} or more"
        yield "context_parallel_degree", f"{what}; {fix}"
    numbers = {model.n_heads, *(b.heads for b in model.heads_of_blocks)}
    of_ranks = [divmod(number, parallel.tensor_parallel_degree) for number in sorted(numbers)]
    # layout_rules.py reports a remainder
    heads = next((heads for heads, rest in of_ranks if not rest and heads % cp), 0)
    # Each rank gets whole heads of the whole sequence.
    if method == "ulysses" and heads:
        fix = 'use "allgather" or "ring"'
        yield (
            key,
            f'"ulysses" cannot share {heads} query heads of a rank among {cp} ranks; {fix}',
        )
    own = longest_sequence(config) // cp
    if method in ("ring", "alltoall") and config.data.document_mask and own > _MASKED_RING:
        size = f"{own:,} x {own:,} for each block"
        yield key, f'"{method}" with document masks makes masks of {size}; use "allgather"'


# Tokens of a rank. Above this, the ring's masks take gigabytes, and no fast kernel accepts them.
_MASKED_RING = 8192


def _recomputation(config: JobConfig) -> Violations:
    section, model = config.activation_checkpoint, config.model.known_sizes
    option, layers = str(section.selective_ac_option), model.n_layers
    selective = section.mode == "selective"
    by_op = selective and option == "op"
    if option != "op" and not re.fullmatch(r"[1-9]\d{0,8}", option, re.ASCII):
        yield "selective_ac_option", f'expected "op" or a number such as 2, got "{option}"'
    elif selective and layers and option != "op" and int(option) > layers:
        yield "selective_ac_option", f"the model has only {layers} layers; use {layers} or less"
    # Only the form of a name is checked here; machine.py looks it up.
    yield from _kept(section, layers)
    if section.op_keep_by_block and not by_op:
        fix = "set that, or remove this key"
        yield "op_keep_by_block", f'needs mode = "selective" with "op"; {fix}'
    if by_op and not (section.op_keep or section.op_keep_by_block):
        yield "op_keep", 'keeps nothing; use mode = "full"'
    if section.mode == "memory_budget" and not _compiles_model(config):
        yield "mode", '"memory_budget" needs compile.enable with the component model; set that'


def _kept(section: ActivationCheckpointSection, layers: int) -> Violations:
    """Check the form of the lists of kept operations.

    Only torch knows operations' names; machine.py looks them up.
    """
    key = "op_keep"
    taken: set[int] = set()
    try:
        for entry in section.op_keep:
            parse_rule(entry)
        key = "op_keep_by_block"
        for line in section.op_keep_by_block:
            blocks, _ = parse_blocks(line)
            if layers and blocks[-1] >= layers:
                yield key, f'"{line[:80]}": the model has only {layers} layers, numbered from 0'
            if taken & {*blocks}:
                yield key, f'"{line[:80]}": an earlier line has one of these blocks, too'
            taken |= {*blocks}
    except SaveListError as error:
        yield key, str(error)


def _compile(config: JobConfig) -> Violations:
    section = config.compile
    if section.enable and section.mode != "default" and section.backend != "inductor":
        yield "mode", f'is a mode of inductor; use "default" with "{section.backend}"'


def _checkpoint(config: JobConfig) -> Violations:
    section, every = config.checkpoint, config.checkpoint.keep_every_n_steps
    if section.initial_load_in_hf:
        if not (section.initial_load_path or config.model.hf_assets_path):
            yield (
                "initial_load_in_hf",
                "needs initial_load_path or model.hf_assets_path; set one",
            )
        if not section.initial_load_model_only:
            yield (
                "initial_load_model_only",
                "a Hugging Face folder holds only weights; use true",
            )
    if section.last_save_in_hf and section.why_unsaved:
        reason = f"nothing is saved in this job, because of {section.why_unsaved}"
        yield "last_save_in_hf", f"{reason}; change that, or use false"
    # Steps between two saves are never kept, since they are never saved.
    if every % section.interval:
        near = max(1, round(every / section.interval)) * section.interval
        yield "keep_every_n_steps", f"is not a multiple of interval; use {near}, or 0"
    if section.create_seed_checkpoint and section.why_unsaved:
        yield "create_seed_checkpoint", "is a save, and this job saves nothing; use false"
    # A URL needs an fsspec implementation that is installed.
    for key in ("folder", "initial_load_path"):
        if "://" in (url := getattr(section, key) or ""):
            from titan.checkpoint.storage import unusable  # imports fsspec

            if reason := unusable(url):
                yield key, f'"{url}": {reason}'
    for name in section.exclude_from_loading:
        if name not in STATE_PARTS:
            yield "exclude_from_loading", f'unknown part "{name}"{choose(name, STATE_PARTS)}'


def _profiling(config: JobConfig) -> Violations:
    section = config.profiling
    # A cycle of the profiler is warm-up, then recording.
    needed = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < needed:
        yield (
            "profile_freq",
            f"must hold profiler_warmup + profiler_active; use {needed} or more",
        )


def _fault_tolerance(config: JobConfig) -> Violations:
    section, checkpoint = config.fault_tolerance, config.checkpoint
    early = config.steps_in_backward
    for key, action in (("on_nonfinite", section.on_nonfinite), ("on_spike", section.on_spike)):
        if action == "rewind" and checkpoint.why_unsaved:
            fix = "set checkpoint.enable = true and load_only = false"
            yield key, f'"rewind" needs checkpoints to go back to; {fix}'
        if action in ("skip", "rewind") and early:
            # The weights are updated before the loss is known.
            yield key, f'"{action}" cannot undo optimizer.early_step_in_backward; use "stop"'
    if section.replay_every and config.parallelism.pipeline_parallel_degree > 1:
        fix = "use 0, or check devices with `titan audit` in another layout"
        yield "replay_every", f"a pipeline interleaves its passes and cannot repeat one; {fix}"
    window, limit = section.spike_window, section.step_timeout_seconds
    # Only the losses of the window are remembered.
    if section.spike_min_steps > window:
        yield "spike_min_steps", f"is more than spike_window; use {window} or less"
    # The stacks take some seconds, and a collective's limit would kill the ranks meanwhile.
    collective, needed = config.comm.train_timeout_seconds, limit + STACKS_S
    if limit and needed > collective:
        lower = f"use {collective - STACKS_S}, or " if collective > STACKS_S else ""
        reason = f"comm.train_timeout_seconds = {collective} ends the ranks before their stacks are written"
        yield (
            "step_timeout_seconds",
            f"{reason}; {lower}set comm.train_timeout_seconds = {needed}",
        )


# Section and rule. Problems on one line of a file are reported in this order.
RULES: tuple[tuple[str, Callable[[JobConfig], Violations]], ...] = (
    ("", _text),
    ("", check_choices),
    ("model", lambda config: iter(config.model.resolved[1])),
    ("task", check_task),
    ("loss", _loss),
    ("hardware", _hardware),
    ("data", _data),
    ("validation", _validation),
    ("training", _training),
    ("phase", check_phases),
    ("optimizer", _optimizer),
    ("optimizer", _early_step),
    ("model", check_converters),
    ("model", lambda config: check_freeze(config.model)),
    ("parallelism", _schedule),
    ("parallelism", _kept_blocks),
    ("parallelism", _tensor),
    ("parallelism", _context),
    ("parallelism", check_experts),
    ("parallelism", check_modules),
    ("activation_checkpoint", _recomputation),
    ("compile", _compile),
    ("checkpoint", _checkpoint),
    ("profiling", _profiling),
    ("fault_tolerance", _fault_tolerance),
)
