"""Command `titan generate`: samples of text from a checkpoint or a Hugging Face folder.

It continues a prompt, a file of prompts or a picture, or holds a conversation. A model that draws
pictures writes them into a file.

titan/tools/generation.py chooses the tokens. With --nproc, or under torchrun, tensor parallelism splits
the model over all ranks. Every rank computes the same tokens, and rank 0 reads and prints.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan.checkpoint.saved_model import AVERAGE_OPTION, LOCATION_OPTION, TOKENIZER_OPTION
from titan.config.errors import COMMAND_LINE, ConfigError, Problem
from titan.config.options import TRUST_OPTION
from titan.run.launch_extension import launcher

from .tables import parser_of

if TYPE_CHECKING:
    import torch


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = parser_of("generate")
    add = parser.add_argument
    # Earlier versions had only the option, which a shell's history still has.
    add("folder", metavar="FOLDER", nargs="?", **LOCATION_OPTION)
    add("--checkpoint", dest="named", **(LOCATION_OPTION | {"help": argparse.SUPPRESS}))
    add("--average", **AVERAGE_OPTION)
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--trust-remote-code", **TRUST_OPTION)
    args = parser.parse_args(argv)
    args.checkpoint = args.folder or args.named
    if args.checkpoint is None:
        parser.error("the following arguments are required: FOLDER")
    return args


def _check(args: argparse.Namespace) -> torch.device:
    """Return the device of --device, or the best device.

    Raises:
        ConfigError: options are wrong. It lists all of them.
    """
    wrong = [
        (f"--{name}", f"expected a number of at least 0, got {value}")
        for name in ("max-new-tokens", "temperature", "top-k")
        if not 0 <= (value := getattr(args, name.replace("-", "_"))) < math.inf
    ]
    if args.prompt and (args.prompts or args.interactive):
        fault = "is for one text: leave out --prompts and --interactive"
        wrong.append(("--prompt", fault))
    if args.interactive and (args.nproc > 1 or "RANK" in os.environ):
        wrong.append(("--interactive", "one process answers: leave out --nproc"))
    if not -(2**63) <= args.seed < 2**63:
        wrong.append(("--seed", f"expected a whole number below 2^63, got {args.seed}"))
    import torch

    from titan.checkpoint.tensors import reason
    from titan.parallel.init_distributed import usable_accelerator

    device = args.device or usable_accelerator() or "cpu"
    try:
        # Do not allocate: each process of --nproc would take memory of GPU 0, and fail on an exclusive GPU.
        wanted = torch.device(device)
        count = 1 if wanted.type == "cpu" else torch.get_device_module(wanted).device_count()
        if (wanted.index or 0) >= count:
            raise RuntimeError(f"this machine has {count or 'none'}")
    except Exception as error:  # torch has many types for a device that does not exist
        why = reason(error).split(". ")[0]
        wrong.append(("--device", f"cannot use {device}: {why}"))
    if wrong:
        raise ConfigError(Problem(COMMAND_LINE, 0, *each) for each in wrong)
    return torch.device(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample text from a checkpoint: print the prompt and its continuation."""
    args = parse(argv)
    device = _check(args)
    if args.nproc > 1 and "RANK" not in os.environ:
        start = launcher("titan.cli generate ...", args.nproc)
        return start.launch_command("generate", argv, num_processes=args.nproc)
    import torch.distributed as dist

    from titan.parallel.init_distributed import start_process_group

    from .answers import answer

    if "RANK" in os.environ:  # torchrun sets it
        found = start_process_group(init_timeout_s=600, expandable_segments=False)
        device = device if args.device else found
    try:
        answer(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
