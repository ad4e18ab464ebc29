"""Rules that ask the machine: files and folders, the tokenizer, packages, accelerators. Torch-free, as all rules.

They hold where the job runs, or is to run: `titan train`, and `titan check` unless --hardware says that it is about another
machine. The simulator and the writers of cluster scripts do not ask them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from titan.checkpoint.manifest import METADATA, NAME, list_steps
from titan.checkpoint.storage import as_location, join, storage_of
from titan.data import DataError
from titan.data.samples import SampleOptions, build_samples
from titan.data.sources import open_documents, resolve_sources
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer, build_tokenizer
from titan.observe.hardware import count_accelerators

from . import schema as s
from .errors import Problem, RuleViolation, choose, did_you_mean, violations_of
from .model import model_config, resolve_model
from .quantize import quantize_section
from .schema import JobConfig

# torch._dynamo.list_backends(exclude_tags=()), which would import torch. Others come from packages' entry points.
BACKENDS = (
    *("inductor", "eager", "aot_eager", "cudagraphs", "tvm", "openxla", "openxla_eval", "ts", "aot_ts"),
    *("aot_eager_decomp_partition", "aot_eager_decomp_partition_crossref", "invoke_subgraph"),
    *("aot_eager_decomp_partition_with_mode", "aot_eager_default_partitioner", "eager_debug"),
    *("eager_noexcept", "pre_dispatch_eager", "dynamo_minifier_backend"),
    *("dynamo_accuracy_minifier_backend", "non_leaf_compile_error_TESTING_ONLY"),
    *("relu_accuracy_error_TESTING_ONLY", "relu_compile_error_TESTING_ONLY"),
    "relu_runtime_error_TESTING_ONLY",
)  # fmt: skip


def check_machine(config: JobConfig) -> list[Problem]:
    """Return everything that the job needs and this machine lacks."""
    rules = (
        _check_folders,
        _check_data,
        _check_checkpoints,
        _check_backend,
        _check_operations,
        _check_accelerator,
        _check_packages,
    )
    return [
        config.source_map.problem(*finding)
        for rule in rules
        for finding in violations_of(rule, config)
    ]


def open_tokenizer(config: JobConfig) -> Tokenizer:
    """Return the job's tokenizer; raises DataError if it cannot be read, or has more tokens than the model."""
    tokenizer = build_tokenizer(config.tokenizer, hf_assets_path=config.model.hf_assets_path)
    vocabulary = model_config(config.model).vocab_size
    if tokenizer.vocab_size > vocabulary:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but {config.model.name} "
            f"{config.model.flavor} has a vocabulary of {vocabulary:,}; set "
            f"model.overrides.vocab_size = {tokenizer.vocab_size} or take another tokenizer"
        )
    return tokenizer


# ---- folders -----------------------------------------------------------------------------------


def _check_folders(config: JobConfig) -> Iterator[RuleViolation]:
    folders = {
        "job.dump_folder": config.job.dump_folder,
        "data.cache_folder": os.path.expanduser(config.data.cache_folder),  # noqa: PTH111 (no error for ~nobody)
        "compile.cache_folder": config.compile.cache_folder if config.compile.enable else "",
    }
    if config.checkpoint.enable and not config.checkpoint.load_only:
        folder = config.checkpoint.folder
        folders["checkpoint.folder"] = folder if Path(folder).is_absolute() else ""
    for key, folder in folders.items():
        if folder and (reason := _why_unwritable(Path(folder))):
            yield key, f"cannot be written: {reason}"


def _why_unwritable(folder: Path) -> str:
    """Return why no file can be made below `folder`, which may be still to be made; empty if it can."""
    try:
        folder = folder.absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return f"{there} is a file"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"no permission to write in {there}"
        if os.statvfs(there).f_bavail == 0 and os.statvfs(there).f_blocks:
            return f"no space is left on the disk of {there}"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


# ---- data --------------------------------------------------------------------------------------


def _check_data(config: JobConfig) -> Iterator[RuleViolation]:
    """The tokenizer, then what each source reads with it."""
    path, assets = config.tokenizer.path, config.model.hf_assets_path
    tokenizer = None
    if resolve_model(config.model)[0] is not None:
        try:
            tokenizer = open_tokenizer(config)
        except Exception as error:  # a file that a stranger wrote, read by libraries of many kinds
            key = (
                "tokenizer.path" if path else "model.hf_assets_path" if assets else "tokenizer.name"
            )
            yield key, _first_line(error)
    yield from _check_marks(config, tokenizer)
    for key, source in _sources(config, "training"):
        yield from _check_source(config, tokenizer, key, source, split="train")
    if config.validation.enable and config.validation.dataset:
        for key, source in _sources(config, "validation"):
            yield from _check_source(config, tokenizer, key, source, split="validation")


def _sources(config: JobConfig, section: str) -> Iterable[tuple[str, s.Section]]:
    """Return the sources of a section, each with the key that says what it reads."""
    if section == "training" and config.data.sources:
        return [(f"data.sources[{n}].path", item) for n, item in enumerate(config.data.sources)]
    dataset, path = getattr(config, section).dataset, getattr(config, section).dataset_path
    key = f"{section}.dataset_path" if path else f"{section}.dataset"
    try:
        return [(key, source) for source in resolve_sources(dataset, dataset_path=path)]
    except DataError:
        return []  # rules.py reports it


def _check_source(
    config: JobConfig, tokenizer: Tokenizer | None, key: str, source: s.Section, *, split: str
) -> Iterator[RuleViolation]:
    package = {s.ParquetSource: "pyarrow", s.HuggingFaceSource: "datasets"}.get(type(source))
    if package and find_spec(package) is None:
        yield key, f"needs {package}: pip install 'titan-pretrain[huggingface]'"
    if isinstance(source, s.HuggingFaceSource):
        if source.path.startswith(("/", ".", "~")) and not _exists(source.path):
            yield key, f"'{source.path}' does not exist"
        return
    try:
        if isinstance(source, s.ShardsSource):
            if tokenizer is not None:
                section = config.validation if split == "validation" else config.training
                seq_len = section.seq_len or config.training.seq_len
                options = SampleOptions(
                    tokenizer=tokenizer, data=config.data, seq_len=seq_len, split=split, seed=0
                )
                build_samples([source], options=options)
        elif isinstance(source, s.TextSource | s.JsonlSource | s.ParquetSource):
            open_documents(source)
    except (OSError, ValueError) as error:  # DataError too
        yield key, _first_line(error)


def _check_marks(config: JobConfig, tokenizer: Tokenizer | None) -> Iterator[RuleViolation]:
    data = config.data
    key = "data.document_mask" if data.document_mask else "data.reset_positions"
    if tokenizer is None or not (data.document_mask or data.reset_positions):
        return
    special_tokens = SpecialTokens.of(tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)
    kinds = {type(source) for _, source in _sources(config, "training")}
    if s.ShardsSource not in kinds and (
        not special_tokens.marks_boundaries or kinds == {s.SyntheticSource}
    ):
        yield (
            key,
            "needs documents that begin or end with a token of their own: set data.add_bos or data.add_eos, with a tokenizer "
            "that has such a token",
        )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, ValueError | OSError) else f"cannot be read: {lines[0]}"


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


# ---- checkpoints -------------------------------------------------------------------------------


def _check_checkpoints(config: JobConfig) -> Iterator[RuleViolation]:
    """Where the run begins. What lies at a URL is looked for by the run only: it may take long."""
    section = config.checkpoint
    if not section.enable or "://" in section.folder:
        return
    folder = Path(config.job.dump_folder) / section.folder
    try:
        steps = list_steps(folder)
    except (OSError, ValueError) as error:
        yield "checkpoint.folder", f"cannot be read: {error}"
        return
    if section.load_step != -1 and section.load_step not in steps:
        there = ", ".join(map(str, steps)) or "none at all"
        yield (
            "checkpoint.load_step",
            f"there is no step {section.load_step} in {folder}; there is {there}",
        )
    if steps or section.load_step != -1:
        return  # a run that goes on does not ask what it began with
    if section.initial_load_in_hf:
        key = (
            "checkpoint.initial_load_path" if section.initial_load_path else "model.hf_assets_path"
        )
        path = section.initial_load_path or config.model.hf_assets_path
        wanted = {"a Hugging Face model": ("config.json",)}
    else:
        key, path = "checkpoint.initial_load_path", section.initial_load_path
        wanted = {"a checkpoint (a step-N folder)": (NAME, METADATA)}
    if path and "://" not in path:
        yield from _check_folder_of(key, path, wanted)


def _check_folder_of(
    key: str, path: str, wanted: dict[str, tuple[str, ...]]
) -> Iterator[RuleViolation]:
    [(what, names)] = wanted.items()
    location = as_location(path)
    if not _exists(path):
        yield key, f"'{path}' does not exist"
    elif not any(storage_of(location).exists(join(location, name)) for name in names):
        steps = list_steps(location)
        hint = f"; did you mean '{join(location, f'step-{steps[-1]}')}'?" if steps else ""
        yield (
            key,
            f"'{path}' is no {what.removeprefix('a ')}: it has no {' and no '.join(names)}{hint}",
        )


# ---- torch and its packages --------------------------------------------------------------------


def _check_backend(config: JobConfig) -> Iterator[RuleViolation]:
    backend = config.compile.backend
    known = [*BACKENDS, *(entry.name for entry in entry_points(group="torch_dynamo_backends"))]
    if config.compile.enable and backend not in known:
        usual = [name for name in known if "_TESTING_" not in name][:9]
        yield "compile.backend", f'unknown backend "{backend}"{choose(backend, usual)}'


def _check_operations(config: JobConfig) -> Iterator[RuleViolation]:
    """Whether torch has the operations that "op" keeps. Names beyond aten are known to torch alone, which says so when the model
    is made."""
    section = config.activation_checkpoint
    names = {entry.partition("/")[0] for entry in section.op_keep}
    names = {name for name in names if name.startswith("aten.")}
    if section.mode == "none" or not names or not (known := operations()):
        return
    for name in sorted(names - known):
        yield (
            "activation_checkpoint.op_keep",
            f"torch has no operation '{name}'{did_you_mean(name, known)}",
        )


def operations() -> set[str]:
    """Return the names of aten's operations, as "aten.mm", by the list that torch is generated from; empty if it is not there."""
    spec = find_spec("torchgen")
    file = (
        Path(spec.origin or "").parent / "packaged/ATen/native/native_functions.yaml"
        if spec
        else None
    )
    if file is None or not file.is_file():
        return set()
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"^- func: (\w+)", text, re.MULTILINE)
    for line in re.findall(r"^  autogen: (.*)$", text, re.MULTILINE):
        names += re.findall(r"(\w+)(?:\.\w+)?", line)
    return {f"aten.{name}" for name in names}


def _check_accelerator(config: JobConfig) -> Iterator[RuleViolation]:
    section = quantize_section(config)
    has_gpu = count_accelerators() > 0
    if section is not None and not section.emulate and not has_gpu:
        yield (
            "model.converters",
            "this machine has no GPU to multiply in 8 bits; set emulate = true to compute the same numbers slowly, or take the "
            "converter out",
        )


def _check_packages(config: JobConfig) -> Iterator[RuleViolation]:
    needed = {
        "metrics.enable_tensorboard": ("tensorboard", config.metrics.enable_tensorboard),
        "metrics.enable_wandb": ("wandb", config.metrics.enable_wandb),
    }
    for key, (package, is_on) in needed.items():
        if is_on and find_spec(package) is None:
            yield key, f"needs {package}: pip install 'titan-pretrain[{package}]'"
    if quantize_section(config) is not None and find_spec("torchao") is None:
        yield "model.converters", "needs torchao: pip install 'titan-pretrain[float8]'"
