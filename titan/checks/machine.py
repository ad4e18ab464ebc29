"""Checks of this machine for a job. Imports no torch.

They cover files and folders, the tokenizer, packages and accelerators. `titan train` and `titan
slurm` check it, and `titan check` unless --hardware names another machine. The simulator does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.base.hardware import count_accelerators
from titan.base.untrusted import InputError
from titan.checkpoint.identity import other_tokenizer, sources_of
from titan.checkpoint.manifest import METADATA, NAME, list_steps
from titan.checkpoint.model_folders import model_folders
from titan.checkpoint.storage import as_location, join, storage_of
from titan.config import schema as s
from titan.config.errors import Problem, UnknownValue, Violations, problems_of
from titan.config.phases import sequence_lengths
from titan.config.plug_ins import load_plug_ins
from titan.config.quantize import eight_bit_sections
from titan.config.schema import JobConfig, reads_chats, streams
from titan.config.task import any_options, check_task, reads_text
from titan.data import DataError, default_cache_folder
from titan.data.sources import open_documents
from titan.data.special_tokens import LOSSY, SpecialTokens
from titan.data.tokenizer import Tokenizer, open_tokenizer
from titan.data.unread import unread_line


def check_machine(config: JobConfig, *, device: str | None = None) -> list[Problem]:
    """Return everything that the job needs and this machine lacks.

    Args:
        config: the job.
        device: kind of device that the job will have elsewhere, for example on the login node
            of a cluster; None: this machine's.
    """
    rules = (
        _check_folders,
        _check_data,
        _check_checkpoints,
        partial(_check_packages, device=device),
        *load_plug_ins("titan.rules", of="machine"),
    )
    return [problem for rule in rules for problem in problems_of(rule, config)]


# ---- folders -----------------------------------------------------------------------------------


def _check_folders(config: JobConfig) -> Violations:
    checkpoint = config.checkpoint
    cache = os.path.expanduser(config.data.cache_folder)  # noqa: PTH111 (no error for ~nobody)
    sources = sources_of(config, "training") if reads_text(config) else ()
    if not cache and any(_is_cached(source) for _, source in sources):
        cache = str(default_cache_folder())
    folders = {"job.dump_folder": config.job.dump_folder, "data.cache_folder": cache}
    if config.compile.enable:
        folders["compile.cache_folder"] = config.compile.cache_folder
    # A relative folder is below the run folder.
    if not checkpoint.why_unsaved and Path(checkpoint.folder).is_absolute():
        folders["checkpoint.folder"] = checkpoint.folder
    for key, folder in folders.items():
        if folder and (reason := why_unwritable(Path(folder))):
            where = (
                "" if key != "data.cache_folder" or config.data.cache_folder else f" ({folder})"
            )
            fix = "; name a folder that can" if where else ""
            yield key, f"cannot be written{where}: {reason}{fix}"


def _is_cached(source: s.Section) -> bool:
    """Return whether the tokens of a source are written to the cache."""
    return not (isinstance(source, s.TokenFiles | s.SyntheticSource) or streams(source))


def why_unwritable(folder: Path) -> str:
    """Return the reason why no file can be created below a folder; empty if it can.

    The folder may not exist yet.
    """
    try:
        folder = folder.absolute()
        # The nearest folder that exists. The rest would be created in it.
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            return f"{existing} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"no permission to write in {existing}"
        # Some file systems report no blocks at all.
        if os.statvfs(existing).f_bavail == 0 and os.statvfs(existing).f_blocks:
            return f"no space is left on the disk of {existing}"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


# ---- data --------------------------------------------------------------------------------------


def _check_data(config: JobConfig) -> Iterator[Any]:
    """Check the tokenizer, then each source with it.

    A violation may also have lines to paste (see `Problem`).
    """
    if not reads_text(config):
        if not [*check_task(config)]:
            yield from any_options(config).missing()
        return
    data, tokenizer = config.data, None
    if config.model.resolved[0] is not None:
        try:
            tokenizer = open_tokenizer(config)
        except UnknownValue:  # its mistake is a line already
            pass
        # Libraries of many kinds read a file that anyone may have written.
        except Exception as error:
            if config.tokenizer.path:
                key = "tokenizer.path"
            else:
                key = (
                    "model.hf_assets_path" if config.model.hf_assets_path else "tokenizer.name"
                )
            yield key, _first_line(error)
    # First the training sources, then the validation sources.
    sources = [*sources_of(config, "training")]
    best_fit = data.packing == "best_fit"
    if tokenizer is not None and (data.document_mask or data.reset_positions or best_fit):
        tokens = SpecialTokens.of(tokenizer, add_bos=data.add_bos, add_eos=data.add_eos)
        kinds = {type(source) for _, source in sources}
        # Shards know where their documents begin.
        if s.ShardsSource not in kinds and (
            not tokens.marks_boundaries or kinds == {s.SyntheticSource}
        ):
            key = "data.packing" if best_fit else "data.document_mask"
            fix = "set data.add_bos or data.add_eos, with a tokenizer that has such a token"
            yield key, f"needs documents that begin or end with a token of that kind; {fix}"
    for key, source in sources:
        if best_fit and streams(source):
            yield (
                "data.packing",
                f'"best_fit" is not for streams, as {key} is; set streaming = false',
            )
        yield from _check_source(config, tokenizer, key, source, split="train")
    if config.validation.enable and config.validation.dataset:
        for key, source in sources_of(config, "validation"):
            yield from _check_source(config, tokenizer, key, source, split="validation")


def _check_source(
    config: JobConfig, tokenizer: Tokenizer | None, key: str, source: Any, *, split: str
) -> Iterator[Any]:
    package = {s.ParquetSource: "pyarrow", s.HuggingFaceSource: "datasets"}.get(type(source))
    if package and find_spec(package) is None:
        yield key, f"needs {package}: pip install 'titan-pretrain[huggingface]'"
    # Do not ask the hub for the dataset: the login node may have no network.
    if isinstance(source, s.HuggingFaceSource):
        if source.path.startswith(("/", ".", "~")) and not _exists(source.path):
            yield key, f"'{source.path}' does not exist"
        return
    try:
        if isinstance(source, s.TextSource | s.JsonlSource | s.CsvSource | s.ParquetSource):
            open_documents(source).try_first()
        has_chats = reads_chats(source)
        if tokenizer is not None and (has_chats or isinstance(source, s.TokenFiles)):
            try_rows(config, tokenizer, source, split=split, count=3)
    except (OSError, ValueError) as error:  # DataError too
        paste = error.paste if isinstance(error, DataError) else ()
        yield key, _first_line(error), paste


def try_rows(
    config: JobConfig,
    tokenizer: Tokenizer,
    source: s.Section,
    *,
    split: str = "train",
    count: int,
) -> list[str]:
    """Read the first rows of a source, or open its shards, as a run does. Return a warning about unread keys."""
    from titan.data.samples import SampleOptions, build_samples, spec_of  # imports numpy
    from titan.data.writer import unread_of

    section = config.validation if split == "validation" else config.training
    options = SampleOptions(
        tokenizer=tokenizer,
        data=config.data.model_copy(update={"packing": "cut"}),  # "cut" plans no rows
        seq_len=section.seq_len or config.training.seq_len,
        split=split,
        seed=0,
        num_lengths=len(sequence_lengths(config)) if split == "train" else 1,
    )
    if isinstance(source, s.TokenFiles):
        return [*build_samples([source], options=options).unread]
    line = unread_line(unread_of(open_documents(source), spec_of(source, options), count=count))
    return [line] if line else []


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return (
        lines[0] if isinstance(error, ValueError | OSError) else f"cannot be read: {lines[0]}"
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


# ---- checkpoints -------------------------------------------------------------------------------


def _check_checkpoints(config: JobConfig) -> Violations:
    """Check the initial weights of the run. Only the run itself looks at URLs, since that may take long."""
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
        existing = ", ".join(map(str, steps)) or "none at all"
        message = f"there is no step {section.load_step} in {folder}; there is {existing}"
        yield "checkpoint.load_step", message
    starts = steps or section.initial_load_in_hf or section.initial_load_path
    is_far = "://" in (section.initial_load_path or "")
    tokenizer = try_tokenizer(config) if starts and not is_far else None
    if tokenizer and (why := other_tokenizer(config, tokenizer, folder)):
        yield "tokenizer.path" if config.tokenizer.path else "tokenizer.name", why
    if steps or section.load_step != -1:
        return  # a resumed run does not load its initial weights again
    key, path = "checkpoint.initial_load_path", section.initial_load_path
    what, names = "checkpoint (a step-N folder)", (NAME, METADATA)
    if section.initial_load_in_hf:
        what, names = "Hugging Face model", ("config.json",)
        if not path:
            key, path = "model.hf_assets_path", config.model.hf_assets_path
    if not path or "://" in path:
        return
    location = as_location(path)
    if not _exists(path):
        yield key, f"'{path}' does not exist"
    # The parent of step-N folders is a common mistake.
    elif not any(storage_of(location).exists(join(location, name)) for name in names):
        steps = list_steps(location)
        hint = f"; did you mean '{join(location, f'step-{steps[-1]}')}'?" if steps else ""
        if NAME in names and storage_of(location).exists(join(location, "config.json")):
            hint = "; it is a Hugging Face folder: set checkpoint.initial_load_in_hf = true"
        yield key, f"'{path}' is no {what}: it has no {' and no '.join(names)}{hint}"


def try_tokenizer(config: JobConfig) -> Tokenizer | None:
    """Return a job's tokenizer, if it can be opened. `_check_data` reports the error."""
    with suppress(Exception):
        return open_tokenizer(config) if reads_text(config) else None


def advise_text(config: JobConfig) -> list[str]:
    """Return warnings about the limits of a job's tokenizer."""
    tokenizer, warnings = try_tokenizer(config), []
    if tokenizer is None:
        return []
    if tokenizer.eos_id is None:
        message = (
            f"{tokenizer.file} names no token that ends texts: documents run into each other, and an exported model never "
            "stops; if the vocabulary has such a token, name it here"
        )
        warnings.append(config.source_map.problem("tokenizer.eos_token", message))
    if not tokenizer.keeps_bytes:
        warnings.append(config.source_map.problem("tokenizer.path", LOSSY))
    return [*map(str, warnings), *tokenizer.unread]


def first_weights(config: JobConfig) -> str:
    """Return the Hugging Face folder that a job starts from, or "". Loading it names the keys that nothing reads."""
    section = config.checkpoint
    folder = section.initial_load_path or config.model.hf_assets_path
    return folder or "" if section.initial_load_in_hf else ""


def advise_config(config: JobConfig, folder: str) -> list[str]:
    """Return a warning about unread keys in the config.json of a job's model.

    Args:
        config: the job.
        folder: folder of the file, or the file itself; "": there is none.
    """
    if not folder:
        return []
    path = Path(folder)
    file = path / "config.json" if path.is_dir() else path
    with suppress(InputError):  # another error of the file is the check's, or the loader's
        return model_folders().unread_keys(file, config)  # imports torch
    return []


# ---- torch and other packages ------------------------------------------------------------------


def _check_packages(config: JobConfig, *, device: str | None) -> Violations:
    """Check the hardware and packages of 8-bit matmuls, and the packages of the optimizer and of metrics' sinks."""
    sections = [section for _, section in eight_bit_sections(config)]
    metrics, optimizer = config.metrics, config.optimizer
    traits = config.any_optimizer
    moments = traits.state_dtype
    # /dev/kfd is AMD's driver.
    has_gpu = device == "cuda" or count_accelerators() > 0 or Path("/dev/kfd").exists()
    if not has_gpu and not all(section.emulate for section in sections):
        fix = "set emulate = true to compute the same numbers slowly, or remove the converter"
        yield "model.converters", f"this machine has no GPU to multiply in 8 bits; {fix}"
    needed = {
        "metrics.enable_tensorboard": (
            "tensorboard",
            "tensorboard",
            metrics.enable_tensorboard,
        ),
        "metrics.enable_wandb": ("wandb", "wandb", metrics.enable_wandb),
        "model.converters": ("torchao", "float8", bool(sections)),
        "optimizer.name": ("torchao", "float8", optimizer.name == "AdamW8bit"),
        "optimizer.stochastic_rounding": (
            "torchao",
            "float8",
            traits.stochastic_rounding,
        ),
        "optimizer.state_dtype": (
            "torchao",
            "float8",
            moments not in (None, config.training.dtype),
        ),
    }
    for key, (package, extra, is_needed) in needed.items():
        if is_needed and find_spec(package) is None:
            yield key, f"needs {package}: pip install 'titan-pretrain[{extra}]'"
