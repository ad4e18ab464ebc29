"""Conversion of Hugging Face folders to checkpoints and back, in one process and without a GPU (titan/huggingface/convert.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from titan.checkpoint import CheckpointError
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.identity import tokenizer_facts
from titan.checkpoint.saved_model import (
    find_checkpoint,
    find_saved,
    open_run_tokenizer,
    require_average,
)
from titan.checkpoint.storage import Location
from titan.config.plug_ins import door, parts_of
from titan.config.schema import CheckpointSection, JobConfig
from titan.config.task import reads_text
from titan.config.toml import format_value
from titan.data.tokenizer import tokenizer_named
from titan.data.tokenizer_files import FOLDER, read_asset, tokenizer_files, write_files

from .export import Export, lost_buffers, write_folder
from .load import (
    CONFIG,
    HFFolder,
    HFModel,
    check_folder,
    fill,
    left_out_messages,
    model_keys,
    not_finite,
    open_folder,
    read_sizes,
    require_weights_for,
)
from .quantized import values_name


def from_hf(source: Path, output: Path, *, mtp: bool = False) -> list[str]:
    """Convert a Hugging Face folder to a checkpoint with the config that it implies. Return messages.

    Args:
        source: the Hugging Face folder.
        output: new run folder.
        mtp: whether to keep the modules of multi-token prediction.
    """
    # Refuse a used output folder before reading the input.
    check_new(output)
    name, sizes = read_sizes(opened := open_folder(source), mtp=mtp)
    # Check the folder's own claims, before building a model of these sizes.
    require_weights_for(sizes, opened)
    model = HFModel.of(name, sizes)
    folder = check_folder(source, model)
    model = model.spelled_as(folder.files)
    assets = {file.name: read_asset(file) for file in tokenizer_files(str(source))}
    if assets:  # config.json may name the end token
        assets[CONFIG] = read_asset(source / CONFIG)
    # A run's own writer, so that step 0 is a checkpoint like any other.
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=output)
    metadata = {"format": 1, "step": 0, "tokens": 0, "data": {}, "model_only": True}
    unread: Sequence[str] = ()
    if assets:  # raises an error for an unusable tokenizer
        tokenizer = tokenizer_named(str(source))
        metadata["text"], unread = {"tokenizer": tokenizer_facts(tokenizer)}, tokenizer.unread
    with ExitStack() as stack:
        from safetensors import safe_open

        # safe_open maps a file, so a tensor is read only when it is written.
        open_files = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in set(folder.files.values())
        }
        temporary = stack.enter_context(
            TemporaryDirectory(dir=output.parent, prefix=".converting-")
        )
        state: dict[str, Tensor] = {}
        for ours, shape in model.shapes.items():
            theirs = model.names.get(ours)
            if (
                theirs is None
            ):  # transformers has no such tensor: its value before the first step
                state[f"model.{ours}"] = torch.zeros(shape, dtype=model.buffers[ours])
                continue
            stored_name = values_name(theirs.format(0), folder.files)
            file = folder.files[stored_name]
            stored = open_files[file].get_slice(stored_name)
            is_whole = theirs in folder.files and stored.get_shape() == list(shape)
            if stored.get_dtype() != "F8_E4M3" and is_whole and ours not in model.parts:
                tensor = open_files[file].get_tensor(theirs)
                bad = [] if tensor.isfinite().all() else [not_finite(file, theirs)]
            else:
                # Also mapped to a file: experts are stacked, columns cut out, and quantized weights become bfloat16.
                tensor = mapped(Path(temporary) / ours, shape, stored[:0].dtype)
                bad = fill(folder, {ours: tensor}, model=model)
            if bad:
                raise CheckpointError(bad[0])
            state[f"model.{ours}"] = tensor
        step = manager.save(0, state, metadata=metadata)
    if assets:
        write_files(assets, output / FOLDER)
    keys = _write_job(output, opened, name, sizes, step=Path(step), has_tokenizer=bool(assets))
    return [
        f"{step}: {name} {keys.get('flavor', source.name)}, {sizes.num_params:,} parameters",
        *left_out_messages(folder, model),
        *unread,
        f"train it: titan train JOB.toml {output / 'config.toml'}",
    ]


def _write_job(
    output: Path, opened: HFFolder, name: str, sizes: Any, *, step: Path, has_tokenizer: bool
) -> dict[str, Any]:
    """Write the part of a job that a checkpoint implies, and config.json if the family reads it. Return the keys of [model]."""
    keys = model_keys(name, sizes, described := (output / "model.json").absolute())
    if "hf_path" in keys:
        described.write_text(json.dumps(opened.config, indent=2))
    tokenizer = {"name": "auto", "path": str((output / FOLDER).absolute())}
    sections = {
        "model": keys,
        # Not model.hf_assets_path: a job's own [tokenizer] would have priority over it.
        "tokenizer": tokenizer if has_tokenizer else {},
        "checkpoint": {"initial_load_path": str(step.absolute())},
    }
    (output / "config.toml").write_text(
        "# The model of the checkpoint beside this file. Lay it over a job: titan train job.toml config.toml\n"
        + toml_of(sections)
    )
    return keys


def mapped(file: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a file's memory, so that the kernel may write it out.

    Args:
        file: new file of the tensor.
        shape: shape of the tensor.
        dtype: its dtype. A dtype of 8 bits becomes bfloat16.
    """
    dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)


@door("convert")
class WriteBeside(Protocol):
    """Function that writes a file beside exported weights."""

    def __call__(
        self,
        output: Path,
        config: JobConfig,
        run: Path,
        /,
        **about: Any,
    ) -> None:
        """Write the file.

        Args:
            output: folder of the weights.
            config: the job of the run.
            run: folder of the run.
            **about: `what`, the architecture, number of parameters and precision; `saved`, the step and tokens of the
                checkpoint; `is_average`, whether the weights are an average.
        """
        ...


def to_hf(
    source: Location,
    output: Path,
    *,
    dtype: str | None,
    file_bytes: int,
    tokenizer: str,
    average: bool = False,
    trust_remote_code: bool = False,
) -> list[str]:
    """Write the weights of a step as a Hugging Face folder.

    Args:
        source: a step, or a run folder, which stands for its newest step.
        output: new folder.
        dtype: name of the precision of the weights; None: the stored precision.
        file_bytes: largest size of a file.
        tokenizer: path of a tokenizer; "": the run's.
        average: whether to write the average of the weights, which the job must keep
            ([average]).
        trust_remote_code: as for `find_checkpoint`.

    Returns:
        Messages.
    """
    check_new(output)
    config, step = find_checkpoint(
        source, tokenizer=tokenizer, trust_remote_code=trust_remote_code
    )
    if average:
        require_average(step)
    opened = open_run_tokenizer(config) if reads_text(config) else None
    stored = checkpoints.stored_shapes(step)
    weights = (kind for name, (_, kind) in stored.items() if name.startswith("model."))
    # All weights of a step have one dtype.
    kind = getattr(torch, dtype) if dtype else next(weights, torch.float32)
    export = Export.of(config, tokenizer=opened, dtype=kind, file_bytes=file_bytes)
    model = export.model

    # One process holds every tensor, so there is nothing to gather.
    def whole(ours: str, dtype: torch.dtype) -> Tensor:
        name = f"average.{ours}" if average and ours not in model.buffers else f"model.{ours}"
        state = {name: torch.empty(model.shapes[ours], dtype=dtype)}
        checkpoints.load(step, state)
        return state[name]

    buffers = {ours: whole(ours, model.buffers[ours]) for ours in model.off_disk}
    if lost := lost_buffers(model, buffers):
        raise CheckpointError(f"{step}: {lost[0]}")

    output.parent.mkdir(parents=True, exist_ok=True)
    write_folder(
        output,
        export,
        fetch=partial(export.read, whole=whole),
        ranks_of={name: [0] for name in model.names},
        group=CheckpointGroup(),
    )
    precision = str(kind).removeprefix("torch.")
    size = f"{model.sizes.num_params:,} parameters in {precision}"
    saved = checkpoints.read_metadata(step, "step", "tokens")
    run = Path(str(step)).parents[1]
    about = {"what": f"{model.architecture}, {size}", "saved": saved, "is_average": average}
    for write in parts_of(WriteBeside):
        write(output, find_saved(step)[0], run, **about)
    messages = [f"{output}: {model.architecture}, {size}"]
    if opened and not export.assets:
        messages.append(f'no tokenizer files: the run used "{opened.kind}", which has none')
    return messages


def check_new(output: Path) -> None:
    """Check that an output folder is new or empty.

    Raises:
        CheckpointError: it holds files.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is there already; name a new folder, or remove it")


def toml_of(sections: dict[str, dict[str, Any]]) -> str:
    """Return sections as TOML, without those that are empty."""
    lines: list[str] = []
    for name, values in sections.items():
        lines += [f"[{name}]"] * bool(values)
        lines += [f"{key} = {format_value(value)}" for key, value in values.items()]
    return "\n".join([*lines, ""])
