"""Command `titan convert`.

It runs in one process and without a GPU:

    titan convert from-hf Llama-3.2-1B/ llama/     writes llama/checkpoint/step-0, and llama/config.toml with the model's keys
    titan convert to-hf RUN/checkpoint/step-1000 out/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from titan.checkpoint.saved_model import AVERAGE_OPTION, TOKENIZER_OPTION
from titan.checkpoint.storage import as_location
from titan.config.options import TRUST_OPTION, command_parser, mistake

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--output",
        dest="named",
        type=Path,
        metavar="OUT",
        help="the same, as in other commands",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser(
        "convert", summary="Convert Hugging Face folders to checkpoints and back."
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="{from-hf,to-hf}")
    command = ways.add_parser("from-hf", help="make a checkpoint of safetensors and config.json")
    command.add_argument("source", type=Path, metavar="DIR", help="a Hugging Face folder")
    _add_output(command)
    command.add_argument(
        "--mtp",
        action="store_true",
        help="keep the modules of multi-token prediction, if the folder has them",
    )
    command = ways.add_parser("to-hf", help="make a folder that transformers loads")
    add = command.add_argument
    add(
        "source",
        type=as_location,
        metavar="STEP_DIR",
        help="a step-N folder or its URL, or a run folder (its newest step)",
    )
    _add_output(command)
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="precision of the weights; default: as they are stored",
    )
    add(
        "--max-shard-size",
        type=_size,
        default=5 * _UNITS["GB"],
        metavar="SIZE",
        help="the largest size of a file; default: 5GB",
    )
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--trust-remote-code", **TRUST_OPTION)
    add("--average", **AVERAGE_OPTION)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `titan convert`. Return its exit code, as in docs/cluster.md."""
    args = parse(argv)
    args.output = args.output or args.named
    if args.output is None:
        raise mistake("", "OUT: missing; `titan convert --help` explains")
    from . import conversion

    if args.way == "from-hf":
        messages = conversion.from_hf(args.source, args.output, mtp=args.mtp)
    else:
        messages = conversion.to_hf(
            args.source,
            args.output,
            dtype=args.dtype,
            file_bytes=args.max_shard_size,
            tokenizer=args.tokenizer,
            average=args.average,
            trust_remote_code=args.trust_remote_code,
        )
    print("\n".join(messages))
    return 0
