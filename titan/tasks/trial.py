"""Trial of a task's own loss before a run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.base.untrusted import InputError
from titan.config.base import completed
from titan.config.task import OptionDefaults
from titan.tasks.base import Task

_NUM_LOGITS = 2**24  # of the trial: 64 MiB


def try_loss(task: Task, mesh: DeviceMesh, device: torch.device) -> None:
    """Try a task's own loss of logits on a sample of zeros, and on two. Raises InputError if it is no sum that can be trained on."""
    if not completed(task.options, OptionDefaults).predicts_tokens or task.loss_can(
        "applies_output"
    ):
        return
    try:
        one, two = (_value(task, mesh, device, count) for count in (1, 2))
        if one and abs(two - 2 * one) > 1e-3 * abs(one):
            raise ValueError(
                f"{one:.6g} for one sample, {two:.6g} for the same twice: return a sum, since titan divides by the count of the global batch"
            )
    except Exception as error:  # a package's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        message = f"the loss of {type(task).__qualname__} failed its trial: {reason}"
        raise InputError(f"{message}; see docs/models.md, A task of your own") from error


def _value(task: Task, mesh: DeviceMesh, device: torch.device, count: int) -> float:
    """Return the loss of one sample, `count` times, and of random logits."""
    batch, vocabulary = task.fake_batch(), task.sizes.vocab_size
    length = max(1, _NUM_LOGITS // vocabulary)

    def few(name: str, x: Tensor) -> Tensor:
        x = x[:1, :length] if name in batch.ALONG_SEQUENCE else x[:1]
        return torch.cat([x] * count).to(device)

    micro = task.microbatch(task.complete(batch.map(few), device=device, is_cut=False))
    shape = (1, *micro.input.shape[1:2], vocabulary)
    logits = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    logits = torch.cat([logits] * count).requires_grad_()
    value = task.loss(mesh, output=None, float8=())(logits, micro.targets)
    is_tensor = isinstance(value, Tensor)
    if not is_tensor or value.shape:
        what = value.shape if is_tensor else type(value).__name__
        raise ValueError(f"it returned {what}, not a scalar tensor: return the sum")
    if not value.requires_grad or not value.isfinite():
        raise ValueError(f"{value} is not finite, or has no gradient in the logits")
    return value.item()
