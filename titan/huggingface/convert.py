"""Command `titan convert`.

It runs in one process and without a GPU:

    titan convert from-hf Llama-3.2-1B/ llama/     writes llama/checkpoint/step-0, and llama/config.toml with the model's keys
    titan convert to-hf RUN/checkpoint/step-1000 out/ --dtype bfloat16
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Protocol

from titan.checkpoint.saved_model import AVERAGE_OPTION, TOKENIZER_OPTION
from titan.checkpoint.storage import as_location
from titan.config.options import TRUST_OPTION, add_options, command_parser, mistake
from titan.config.plug_ins import door, parts_of
from titan.config.toml import table_beside

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


@door("converter")
class Converter(Protocol):
    """Function that adds a way of `titan convert`."""

    def __call__(self, ways: Any, /) -> None:
        """Add a parser to `ways`. Its default of `convert` takes the options and returns messages."""
        ...


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser(
        "convert", summary="Convert checkpoints of other programs, and back."
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="WAY")
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
    for add_way in parts_of(Converter):
        add_way(ways)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `titan convert`. Return its exit code, as in docs/cluster.md."""
    options = vars(parse(argv))
    way, named = options.pop("way"), options.pop("named")
    options["output"] = options["output"] or named
    if options["output"] is None:
        raise mistake("", "OUT: missing; `titan convert --help` explains")
    from . import conversion

    convert = options.pop("convert", None) or vars(conversion)[way.replace("-", "_")]
    print("\n".join(convert(**options)))
    return 0
