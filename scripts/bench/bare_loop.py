"""A training loop in plain PyTorch, as a yardstick: `python scripts/bench/bare_loop.py JOB.toml [OVERLAY.toml ...]` (steps.py does).

titan's model, torch's everything else. Weights are kept twice: in bf16, which the model computes with, and in fp32, which
AdamW updates; a gradient is cast to fp32 as soon as it is there, and after the step the bf16 weights are copied anew. These are the
casts of FSDP and of titan, with neither FSDP nor autocast. Compiled, it is the whole model with the loss, in one
graph. The batch is the same at each step and is on the device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from steps import NUM_TOKENS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan.config.load import load_config
from titan.config.model import family
from titan.config.schema import JobConfig
from titan.observe.memory import peak_memory

# What selective checkpointing keeps: every matrix product, and attention.
KEEP = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
]


def build_model(config: JobConfig, device: torch.device) -> nn.Module:
    """The model in fp32, converted to float8 and checkpointed where the job says so."""
    with device:
        model = family(config.model.name).build_model(config.model.sizes)
    if config.model.converters:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            module_filter_fn=lambda _, name: name != "output",
            config=Float8LinearConfig(emulate=config.quantize.linear.float8.emulate),
        )
    mode = config.activation_checkpoint.mode
    if mode != "none":
        settings = {}
        if mode == "selective":
            settings["context_fn"] = partial(create_selective_checkpoint_contexts, KEEP)
        for block in model.layers.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **settings)
    return model


def build_step(
    config: JobConfig, model: nn.Module
) -> tuple[Callable[[Tensor, Tensor], Tensor], torch.optim.Optimizer]:
    """Return the step, which maps tokens (B, S) and labels (B x S,) to the loss, and its optimizer."""
    weights = [p.detach().clone() for p in model.parameters()]
    model.bfloat16()
    for parameter, weight in zip(model.parameters(), weights, strict=True):

        def cast(parameter: Tensor, weight: Tensor = weight) -> None:
            assert parameter.grad is not None
            weight.grad, parameter.grad = parameter.grad.float(), None

        parameter.register_post_accumulate_grad_hook(cast)
    optimizer = torch.optim.AdamW(
        weights, lr=config.optimizer.lr, betas=(0.9, 0.95), fused=True
    )

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels)

    if config.compile.enable:
        loss_of = torch.compile(loss_of)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), weights)
        return loss

    return step, optimizer


def train(config: JobConfig) -> None:
    training, log_freq = config.training, config.metrics.log_freq
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    train_step, _ = build_step(config, build_model(config, device))
    shape = (training.local_batch_size, training.seq_len + 1)
    rows = torch.randint(NUM_TOKENS, shape, device=device)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].flatten()
    with (Path(config.job.dump_folder) / "metrics.jsonl").open("w") as metrics:
        begin, last = time.perf_counter(), 0
        for step in range(1, training.steps + 1):
            loss = train_step(tokens, labels)
            if step == 1 or step % log_freq == 0:
                row = {"step": step, "loss": loss.item()}  # waits for the device
                elapsed = time.perf_counter() - begin
                row["tokens_per_s"] = (step - last) * labels.numel() / elapsed
                memory = peak_memory(reset=True)
                row |= {
                    "memory_gib": memory.reserved_gib,
                    "memory_active_gib": memory.active_gib,
                }
                metrics.write(json.dumps(row) + "\n")
                begin, last = time.perf_counter(), step


if __name__ == "__main__":
    train(load_config(sys.argv[1], overlays=sys.argv[2:]))
