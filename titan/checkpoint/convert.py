"""Run `titan convert`, in one process and without a GPU.

titan convert from-hf Llama-3.2-1B/ llama/     writes llama/checkpoint/step-0, and llama/config.toml with the model's keys
titan convert to-hf RUN/checkpoint/step-1000 out/ --dtype bfloat16
titan convert upgrade RUN/checkpoint/step-1000    adds tensors.json to a step that an older titan wrote
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata

from titan.checkpoint import CheckpointError, SaveFailed, tensor_index
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.export import (
    DEFAULT_FILE_BYTES,
    Export,
    lost_buffers,
    read_asset,
    tokenizer_files,
    write_folder,
)
from titan.checkpoint.huggingface import (
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
from titan.checkpoint.manifest import METADATA, HashingStream, file_sizes, read_manifest, render
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.storage import Location, as_location, join, storage_of
from titan.checkpoint.tensors import index_of
from titan.config.load import ConfigError
from titan.config.schema import CheckpointSection
from titan.config.toml import format_value
from titan.data.tokenizer import build_tokenizer, tokenizer_named
from titan.generate import find_checkpoint
from titan.untrusted import InputError

# The classes and functions that DCP's .metadata refers to.
_DCP_NAMES = {
    *((dcp_metadata.__name__, name) for name in dcp_metadata.__all__),
    (dcp_metadata.__name__, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def from_hf(source: Path, output: Path) -> list[str]:
    """Write a checkpoint of a Hugging Face folder's weights, and the config that it implies. Return messages."""
    # Refuse before anything is read: the output must be new or empty.
    _check_new(output)
    name, sizes = read_sizes(opened := open_folder(source))
    # Checked on the folder's own claims, before a model of those sizes is built.
    require_weights_for(sizes, opened)
    model = HFModel.of(name, sizes)
    folder = check_folder(source, model)
    assets = {file.name: read_asset(file) for file in tokenizer_files(str(source))}
    if assets:
        tokenizer_named(str(source))  # raises where it cannot be used
    # The same writer as a run's, so step 0 is a checkpoint like any other.
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=output)
    metadata = {"format": 1, "step": 0, "tokens": 0, "data": {}, "model_only": True}
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
            if theirs is None:  # transformers has none: as before the first step
                state[f"model.{ours}"] = torch.zeros(shape, dtype=model.buffers[ours])
                continue
            file = folder.files[theirs.format(0)]
            stored = open_files[file].get_slice(theirs.format(0))
            if stored.get_dtype() != "F8_E4M3" and theirs in folder.files:
                tensor = open_files[file].get_tensor(theirs)
                bad = [] if tensor.isfinite().all() else [not_finite(file, theirs)]
            else:
                # Mapped to a file of its own too: experts are stacked, and fp8 becomes bfloat16.
                tensor = _mapped(Path(temporary) / ours, shape, stored[:0].dtype)
                bad = fill(folder, {ours: tensor}, model=model)
            if bad:
                raise CheckpointError(bad[0])
            state[f"model.{ours}"] = tensor
        step = manager.save(0, state, metadata=metadata)
    for file_name, data in assets.items():
        (output / file_name).write_bytes(data)
    keys = model_keys(name, sizes)
    sections = {
        "model": keys,
        # Not model.hf_assets_path, because a job's own [tokenizer] would win over it.
        "tokenizer": {"name": "auto", "path": str(output.absolute())} if assets else {},
        "checkpoint": {"initial_load_path": str(Path(step).absolute())},
    }
    overlay = output / "config.toml"
    overlay.write_text(
        "# The model of the checkpoint beside this file. Lay it over a job: titan train job.toml config.toml\n"
        + "\n".join(f"[{name}]\n{_lines(values)}" for name, values in sections.items() if values)
    )
    return [
        f"{step}: {name} {keys['flavor']}, {sizes.num_params:,} parameters",
        *left_out_messages(folder, sizes),
        f"train it: titan train JOB.toml {overlay}",
    ]


def _mapped(file: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is a file's, so that the kernel may write it out. fp8 becomes bfloat16."""
    dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)


def to_hf(
    source: Location, output: Path, *, dtype: torch.dtype | None, file_bytes: int
) -> list[str]:
    """Write a Hugging Face folder of a step's weights. Return messages. dtype: None keeps the stored precision."""
    _check_new(output)
    config, step = find_checkpoint(source)
    stored = checkpoints.stored_shapes(step)
    tokenizer = build_tokenizer(config.tokenizer, hf_assets_path=config.model.hf_assets_path)
    weights = (kind for name, (_, kind) in stored.items() if name.startswith("model."))
    # All weights of a step have one dtype.
    dtype = dtype or next(weights, torch.float32)
    export = Export.of(config, tokenizer=tokenizer, dtype=dtype, file_bytes=file_bytes)
    model = export.model

    # One process holds every tensor, so there is nothing to gather.
    def whole(ours: str, dtype: torch.dtype) -> Tensor:
        state = {f"model.{ours}": torch.empty(model.shapes[ours], dtype=dtype)}
        checkpoints.load(step, state)
        return state[f"model.{ours}"]

    buffers = {ours: whole(ours, model.buffers[ours]) for ours in model.off_disk}
    if lost := lost_buffers(model, buffers):
        raise CheckpointError(f"{step}: {lost[0]}")

    def fetch(names: Sequence[str], keep: bool) -> checkpoints.StateDict:
        return export.read(names, whole)

    output.parent.mkdir(parents=True, exist_ok=True)
    ranks_of = {name: [0] for name in model.names}
    write_folder(output, export, fetch=fetch, ranks_of=ranks_of, group=CheckpointGroup())
    precision = str(dtype).removeprefix("torch.")
    size = f"{model.sizes.num_params:,} parameters in {precision}"
    messages = [f"{output}: {model.architecture}, {size}"]
    if not export.assets:
        text = f'no tokenizer files: the run used "{tokenizer.kind}", which has none'
        messages.append(text)
    return messages


class _MetadataUnpickler(pickle.Unpickler):
    """Read DCP's .metadata. A pickle can look up only the classes that it consists of, and so call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _DCP_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module:.80}.{name:.80}")


def upgrade(step: Location) -> list[str]:
    """Add tensors.json to a step that was written without it, and name it in the manifest. Return messages."""
    storage, where = storage_of(step), join(step, tensor_index.NAME)
    if storage.exists(where):
        return [f"{where} is there already"]
    try:
        with storage.open(join(step, METADATA), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        text = tensor_index.render(index_of(metadata, metadata.storage_data))
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{join(step, METADATA)} is refused: {error}") from error
    storage.write(where, text)
    # The new index must describe whole tensors, or the step stays as it was.
    try:
        tensor_index.read_index(step, file_sizes(step))
        if storage.exists(join(step, MANIFEST)):
            _add_to_manifest(step, text)
    except (OSError, InputError):
        storage.remove(where)
        raise
    return [f"{where} is written"]


def _add_to_manifest(step: Location, text: bytes) -> None:
    storage, manifest = storage_of(step), read_manifest(step)
    hashing = HashingStream(io.BytesIO())
    hashing.write(text)
    files = manifest.files | {tensor_index.NAME: hashing.entry()}
    # By a rename: a crash must not leave half a manifest.
    storage.write(join(step, f"{MANIFEST}.new"), render(replace(manifest, files=files)))
    storage.rename(join(step, f"{MANIFEST}.new"), join(step, MANIFEST))


def _check_new(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is there already; name a new folder, or remove it")


def _lines(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {format_value(value)}\n" for key, value in values.items())


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's options."""
    parser = argparse.ArgumentParser(
        prog="titan convert", description="Convert Hugging Face folders to checkpoints and back."
    )
    ways = parser.add_subparsers(dest="way", required=True)
    command = ways.add_parser("from-hf", help="make a checkpoint of safetensors and config.json")
    command.add_argument("source", type=Path, metavar="DIR", help="a Hugging Face folder")
    command.add_argument("output", type=Path, metavar="OUT", help="a new folder")
    command = ways.add_parser("to-hf", help="make a folder that transformers loads")
    add = command.add_argument
    help_ = "a step-N folder or its URL, or a run folder (its newest step)"
    add("source", type=as_location, metavar="STEP_DIR", help=help_)
    add("output", type=Path, metavar="OUT", help="a new folder")
    help_ = "precision of the weights; default: as they are stored"
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=help_)
    size = {"type": _size, "default": DEFAULT_FILE_BYTES, "metavar": "SIZE"}
    add("--max-shard-size", **size, help="the largest size of a file; default: 5GB")
    help_ = "add tensors.json to a checkpoint that an older titan wrote"
    command = ways.add_parser("upgrade", help=help_)
    command.add_argument("source", type=as_location, metavar="STEP_DIR", help="a step-N folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `titan convert`. Return its exit code, as in docs/architecture.md."""
    args = parse(argv)
    try:
        if args.way == "from-hf":
            messages = from_hf(args.source, args.output)
        elif args.way == "to-hf":
            dtype = getattr(torch, args.dtype) if args.dtype else None
            size = args.max_shard_size
            messages = to_hf(args.source, args.output, dtype=dtype, file_bytes=size)
        else:
            messages = upgrade(args.source)
    except (ConfigError, InputError, SaveFailed) as error:
        print(f"titan convert: {error}", file=sys.stderr)
        return 1 if isinstance(error, SaveFailed) else 2
    print("\n".join(messages))
    return 0
