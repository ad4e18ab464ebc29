"""What a task's loss gets of a model, and a trial of it before the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.config.task import predicts_tokens
from titan.task import Task
from titan.untrusted import InputError

_NUM_LOGITS = 2**24  # of the trial: 64 MiB


def says_of_loss(task: Task, name: str) -> bool:
    """Return what the class that defines the task's `loss` says of it: `applies_output` or `knows_shards`."""
    return vars(next(c for c in type(task).__mro__ if "loss" in vars(c))).get(name, False)


def config_for(task: Task, config: JobConfig) -> JobConfig:
    """Return the job in which the task's loss gets what it can take: whole logits, unless its class says more."""
    changes: dict[str, Any] = {}
    if not says_of_loss(task, "applies_output"):
        changes["loss"] = config.loss.model_copy(update={"chunk_output": False})
    if not says_of_loss(task, "knows_shards"):
        whole = {"disable_loss_parallel": True}
        changes["parallelism"] = config.parallelism.model_copy(update=whole)
    return config.model_copy(update=changes) if changes else config


def require_output_last(model: Any) -> None:
    """Have a model raise InputError if it computes with what its output layer, which was left to the loss, hands on."""
    handed: list[Any] = []
    model.output.register_forward_hook(lambda _, __, x: handed.append(x))

    def check(model: nn.Module, _: Any, result: Any) -> None:
        if handed and handed.pop() is not result:
            raise InputError(
                f"{type(model).__name__} computes with what its output layer returns, as for a soft cap, and the loss applies that layer "
                "itself: set loss.chunk_output = false"
            )

    model.register_forward_hook(check)


def try_loss(task: Task, mesh: DeviceMesh, device: torch.device) -> None:
    """Try a task's own loss of logits on a sample of zeros, and on two. Raises InputError if it is no sum that can be trained on."""
    if not predicts_tokens(task.config) or says_of_loss(task, "applies_output"):
        return
    try:
        one, two = (_value(task, mesh, device, count) for count in (1, 2))
        if one and abs(two - 2 * one) > 1e-3 * abs(one):
            raise ValueError(
                f"{one:.6g} for one sample, {two:.6g} for the same twice: return a sum, since titan divides by the count of the global batch"
            )
    except Exception as error:  # a package's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"the loss of {type(task).__qualname__} failed its trial: {reason}; see docs/own_task.md") from error  # fmt: skip


def _value(task: Task, mesh: DeviceMesh, device: torch.device, count: int) -> float:
    """Return the loss of one sample, `count` times, and of random logits."""
    batch, vocabulary = task.fake_batch(), model_config(task.config.model).vocab_size
    length = max(1, _NUM_LOGITS // vocabulary)

    def few(name: str, x: Tensor) -> Tensor:
        x = x[:1, :length] if name in batch.ALONG_SEQUENCE else x[:1]
        return torch.cat([x] * count).to(device)

    micro = task.microbatch(task.complete(batch.map(few), device=device, is_cut=False))
    shape = (1, *micro.input.shape[1:2], vocabulary)
    logits = torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)
    logits = torch.cat([logits] * count).requires_grad_()
    value = task.loss(mesh, output=None, float8=())(logits, micro.targets)
    if getattr(value, "shape", None) != ():
        what = getattr(value, "shape", type(value).__name__)
        raise ValueError(f"it returned {what}, not a scalar tensor: return the sum")
    if not value.requires_grad or not value.isfinite():
        raise ValueError(f"{value} is not finite, or has no gradient in the logits")
    return value.item()
