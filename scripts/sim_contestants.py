"""Steps that titan is measured against, for the simulator: a bare loop's and TorchTitan's, on the jobs of scripts/bench/steps.py.

    titan sim --script scripts/sim_contestants.py:bare --world-size 1 --hardware h100-sxm --model=1B --batch=2 --variant=compile
    titan sim --script scripts/sim_contestants.py:torchtitan --world-size 1 --hardware h100-sxm --model=8B-blocks --batch=1 --variant=compile+float8

The model, its conversion to float8 and its loss are those of bench/bare_loop.py and of TorchTitan 0.2.2 (`pip install --no-deps torchtitan==0.2.2`);
the order of a step is repeated here. tests/sim/measured_h100.toml has the speeds that were measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
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
        model: Name in steps.MODELS.
        batch: Sequences of a step.
        seq_len: Tokens of a sequence.
        variant: Parts of steps.PARTS, joined by "+".
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
    from bare_loop import build_model

    config = job(model, batch, seq_len, variant)
    module = build_model(config, device)
    weights = [p.detach().clone() for p in module.parameters()]
    module.bfloat16()
    for parameter, weight in zip(module.parameters(), weights, strict=True):

        def cast(parameter: Tensor, weight: Tensor = weight) -> None:
            assert parameter.grad is not None
            weight.grad, parameter.grad = parameter.grad.float(), None

        parameter.register_post_accumulate_grad_hook(cast)
    optimizer = torch.optim.AdamW(weights, lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True)
    tokens, labels = _batch(config, device)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module(tokens).flatten(0, 1).float(), labels.flatten())

    if config.compile.enable:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        loss_of(tokens, labels).backward()
        torch.nn.utils.clip_grad_norm_(weights, config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), weights)

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
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    config, sizes = job(model, batch, seq_len, variant), steps.MODELS[model].sizes
    arguments = TransformerModelArgs(
        dim=sizes.dim,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        vocab_size=sizes.vocab_size,
        ffn_dim_multiplier=sizes.ffn_dim / int(8 * sizes.dim / 3),
        multiple_of=2,  # the factor may round to one less
        norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=sizes.rope_factor or 1.0),
        max_seq_len=seq_len,
    )
    with device:
        module = Transformer(arguments)
    if config.model.converters:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(module, module_filter_fn=lambda _, name: name != "output")
    loss_of = cross_entropy_loss
    if config.compile.enable:
        for name, block in module.layers.named_children():
            module.layers.register_module(name, torch.compile(block, fullgraph=True))
        loss_of = torch.compile(loss_of)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True)
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
