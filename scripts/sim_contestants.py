"""Steps that titan is measured against, for the simulator: a bare loop's and TorchTitan's, on the jobs of scripts/bench/steps.py.

    titan sim --script scripts/sim_contestants.py:bare --world-size 1 --hardware h100-sxm --model=1B --batch=2 --variant=compile
    titan sim --script scripts/sim_contestants.py:torchtitan --world-size 1 --hardware h100-sxm --model=8B-blocks --batch=1 --variant=compile+float8

The bare step is that of bench/bare_loop.py. TorchTitan's has the model and the loss of TorchTitan 0.2.2 (`pip install --no-deps torchtitan==0.2.2`),
and the order of its step is repeated here. tests/sim/measured_h100.toml has the speeds that were measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import steps

from titan.config.load import load_from_argv
from titan.config.schema import JobConfig

Step = tuple[Callable[[], None], nn.Module, torch.optim.Optimizer, int]
"""A program for `titan sim --script`: the step, its model and optimizer, and its tokens."""


def job(model: str, batch: int, seq_len: int, variant: str) -> JobConfig:
    """Return the job of steps.py for a model and a variant.

    Args:
        model: name in steps.MODELS.
        batch: sequences of a step.
        seq_len: tokens of a sequence.
        variant: parts of steps.PARTS, joined by "+".
    """
    settings = {"model": model, "batch": batch, "seq_len": seq_len, "warm_up": 5, "steps": 20}
    with tempfile.TemporaryDirectory() as folder:
        steps.write_job(Path(folder), argparse.Namespace(**settings), variant)
        return load_from_argv([f"{folder}/job.toml", f"{folder}/titan.toml"])


def bare(
    device: torch.device,
    model: str = "1B",
    batch: int = 2,
    seq_len: int = 8192,
    variant: str = "compile",
) -> Step:
    """Build the step of bench/bare_loop.py: bf16 weights beside fp32 ones, one graph around model and loss."""
    from bare_loop import build_model, build_step

    config = job(model, batch, seq_len, variant)
    module = build_model(config, device)
    train_step, optimizer = build_step(config, module)
    tokens, labels = _batch(config, device)

    def step() -> None:
        train_step(tokens, labels.flatten())

    return step, module, optimizer, labels.numel()


def torchtitan(
    device: torch.device,
    model: str = "1B",
    batch: int = 2,
    seq_len: int = 8192,
    variant: str = "compile",
) -> Step:
    """Build the step of TorchTitan's trainer on one GPU: fp32 weights under autocast, a graph for each block and for the loss."""
    # They need Triton, and are for experts, which these models do not have.
    if not find_spec("triton"):
        sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan_sizes import arguments

    config, sizes = job(model, batch, seq_len, variant), steps.MODELS[model].sizes
    sizes_of_model = replace(arguments(sizes), max_seq_len=seq_len)
    with device:
        module = Transformer(sizes_of_model)
    if config.model.converters:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(module, module_filter_fn=lambda _, name: name != "output")
    loss_of = cross_entropy_loss
    if config.compile.enable:
        for name, block in module.layers.named_children():
            module.layers.register_module(name, torch.compile(block, fullgraph=True))
        loss_of = torch.compile(loss_of)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True
    )
    tokens, labels = _batch(config, device)
    num_tokens = torch.ones((), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = module(tokens)
            loss = loss_of(logits, labels) / num_tokens
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm, foreach=True)
        optimizer.step()

    return step, module, optimizer, labels.numel()


def _batch(config: JobConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a step. Their values do not matter in a simulation."""
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    return tokens, torch.zeros_like(tokens)
