"""`titan convert`: Hugging Face folders to checkpoints of titan, and back, in one process and without a GPU.

titan convert from-hf Llama-3.2-1B/ llama/     writes llama/checkpoint/step-0, and llama/config.toml, which says the model
titan convert to-hf RUN/checkpoint/step-1000 out/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from titan.checkpoint import CheckpointError, SaveFailed
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.export import (
    DEFAULT_FILE_BYTES,
    Export,
    read_asset,
    tokenizer_files,
    write_folder,
)
from titan.checkpoint.huggingface import (
    HFModel,
    check_folder,
    model_keys,
    not_finite,
    open_folder,
    read_sizes,
    require_weights_for,
)
from titan.checkpoint.storage import Location, as_location
from titan.config.load import ConfigError
from titan.config.schema import CheckpointSection
from titan.config.toml import format_value
from titan.data.tokenizer import build_tokenizer, tokenizer_named
from titan.generate import find_checkpoint
from titan.untrusted import InputError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def from_hf(source: Path, output: Path) -> list[str]:
    """Write a checkpoint of a Hugging Face folder's weights, and the config it implies; what to say about it."""
    _check_new(output)
    name, sizes = read_sizes(opened := open_folder(source))
    require_weights_for(sizes, opened)
    model = HFModel.of(name, sizes)
    folder = check_folder(source, model)
    assets = {file.name: read_asset(file) for file in tokenizer_files(str(source))}
    if assets:
        tokenizer_named(str(source))  # that it can be used
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=output)
    metadata = {"format": 1, "step": 0, "tokens": 0, "data": {}, "model_only": True}
    with ExitStack() as stack:
        from safetensors import safe_open

        # Maps of the files: a tensor is read when it is written.
        open_files = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in set(folder.files.values())
        }
        state = {
            f"model.{ours}": open_files[folder.files[theirs]].get_tensor(theirs)
            for ours, theirs in model.names.items()
        }
        for ours, theirs in model.names.items():
            if not state[f"model.{ours}"].isfinite().all():
                raise CheckpointError(not_finite(folder.files[theirs], theirs))
        step = manager.save(0, state, metadata=metadata)
    for file_name, data in assets.items():
        (output / file_name).write_bytes(data)
    keys = model_keys(name, sizes)
    sections = {
        "model": keys,
        # Both, and not model.hf_assets_path, over which a job's own [tokenizer] would win.
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
        f"train it: titan train JOB.toml {overlay}",
    ]


def to_hf(
    source: Location,
    output: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int = DEFAULT_FILE_BYTES,
) -> list[str]:
    """Write a Hugging Face folder of a step's weights; what to say about it. dtype None: as they are stored."""
    _check_new(output)
    config, step = find_checkpoint(source)
    stored = checkpoints.stored_shapes(step)
    tokenizer = build_tokenizer(config.tokenizer, hf_assets_path=config.model.hf_assets_path)
    weights = (kind for name, (_, kind) in stored.items() if name.startswith("model."))
    dtype = dtype or next(weights, torch.float32)
    export = Export.of(
        config.model,
        tokenizer=tokenizer,
        tokenizer_path=config.tokenizer.path,
        seq_len=config.training.seq_len,
        dtype=dtype,
        file_bytes=file_bytes,
    )
    model = export.model

    def fetch(names: Sequence[str], keep: bool) -> checkpoints.StateDict:
        state = {f"model.{n}": torch.empty(model.shapes[n], dtype=dtype) for n in names}
        checkpoints.load(step, state)
        return {name: state[f"model.{name}"] for name in names}

    output.parent.mkdir(parents=True, exist_ok=True)
    write_folder(
        output, export, fetch=fetch, ranks_of={n: [0] for n in model.names}, group=CheckpointGroup()
    )
    precision = str(dtype).removeprefix("torch.")
    said = [
        f"{output}: {model.hooks.ARCHITECTURE}, {model.sizes.num_params:,} parameters in {precision}"
    ]
    if not export.assets:
        said.append(f'no tokenizer files: the run used "{tokenizer.kind}", which has none')
    return said


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
    parser = argparse.ArgumentParser(
        prog="titan convert", description="Hugging Face folders to checkpoints and back."
    )
    ways = parser.add_subparsers(dest="way", required=True)
    add = ways.add_parser(
        "from-hf", help="safetensors and config.json to a checkpoint"
    ).add_argument
    add("source", type=Path, metavar="DIR", help="a Hugging Face folder")
    add("output", type=Path, metavar="OUT", help="a new folder")
    add = ways.add_parser(
        "to-hf", help="a checkpoint to a folder that transformers loads"
    ).add_argument
    add(
        "source",
        type=as_location,
        metavar="STEP_DIR",
        help="a step-N folder or its URL, or a run folder (its newest)",
    )
    add("output", type=Path, metavar="OUT", help="a new folder")
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, help="precision of the weights; default: as they are stored")
    add(
        "--max-shard-size",
        type=_size,
        default=DEFAULT_FILE_BYTES,
        metavar="SIZE",
        help="of one file; default: 5GB",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `titan convert`; exit code as in docs/architecture.md."""
    args = parse(argv)
    try:
        if args.way == "from-hf":
            said = from_hf(args.source, args.output)
        else:
            dtype = getattr(torch, args.dtype) if args.dtype else None
            said = to_hf(args.source, args.output, dtype=dtype, file_bytes=args.max_shard_size)
    except (ConfigError, InputError) as error:
        print(f"titan convert: {error}", file=sys.stderr)
        return 2
    except SaveFailed as error:
        print(f"titan convert: {error}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0
