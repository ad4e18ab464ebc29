"""Command `titan convert`.

It runs in one process and without a GPU:

    titan convert from-hf Llama-3.2-1B/ llama/     writes llama/checkpoint/step-0, and llama/config.toml with the model's keys
    titan convert to-hf RUN/checkpoint/step-1000 out/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from titan.checkpoint.saved_model import AVERAGE_OPTION, TOKENIZER_OPTION
from titan.checkpoint.storage import as_location
from titan.config.options import TRUST_OPTION, add_options, command_parser, mistake
from titan.config.toml import table_beside

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser(
        "convert", summary="Convert Hugging Face folders to checkpoints and back."
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="{from-hf,to-hf}")
    options = table_beside(__file__, "options.toml")
    command = ways.add_parser(
        "from-hf", help="make a checkpoint of safetensors and config.json"
    )
    add_options(command, options["from_hf"])
    command = ways.add_parser("to-hf", help="make a folder that transformers loads")
    add_options(command, options["to_hf"], location=as_location, size=_size)
    add = command.add_argument
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
