"""Checks for modules and parameters with which ranks would compute other numbers than one process does.

They are for models that titan did not write. A message names the module or parameter.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from .init_weights import canonical_name


def require_alike_modules(model: nn.Module, *, num_ranks: int) -> None:
    """Raise ValueError for a module whose result depends on this rank's batch, or whose forward changes a weight.

    Args:
        model: any model.
        num_ranks: number of ranks that the batch or the model is split over.

    Raises:
        ValueError: a module computes batch statistics or gradient scales of this rank's batch only, makes sparse gradients, or
            changes a weight in the forward pass.
    """
    for name, module in model.named_modules():
        if reason := _reason(module, num_ranks):
            raise ValueError(
                f"module '{canonical_name(name)}' ({type(module).__name__}) {reason}"
            )


def _reason(module: nn.Module, num_ranks: int) -> str:
    if hasattr(module, "num_embeddings"):
        if getattr(module, "max_norm", None) is not None:
            return "shortens rows of its weight in the forward pass, of which ranks have copies or parts: leave max_norm out, and shorten them after the optimizer's step"
        if getattr(module, "sparse", False):
            return "makes sparse gradients, which cannot be reduced: set sparse=False"
        if num_ranks > 1 and getattr(module, "scale_grad_by_freq", False):
            return "divides gradients by how often an id is in this rank's batch: set scale_grad_by_freq=False"
    normalizes = isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False)
    is_local = normalizes and module.training and not isinstance(module, nn.SyncBatchNorm)
    if num_ranks > 1 and is_local:
        return "takes its statistics from this rank's batch: use nn.SyncBatchNorm, a norm of each sample (GroupNorm, LayerNorm), or eval()"
    return ""


def require_alike_parameters(model: nn.Module) -> None:
    """Raise ValueError for a parameter that FSDP cannot shard, or would reduce to another number.

    Args:
        model: any model.

    Raises:
        ValueError: a parameter is lazy, complex, a scalar, or not contiguous.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            reason = "gets its shape in the first forward pass: run one before, on one process"
        elif parameter.is_complex():
            reason = "is complex, and the cast before the reduction keeps real parts only: use torch.view_as_real"
        elif parameter.ndim == 0:
            reason = "is a single number, which cannot be sharded: give it the shape (1,)"
        elif not parameter.is_contiguous():
            reason = "is not contiguous in memory: make it so (.contiguous()) before"
        else:
            continue
        raise ValueError(f"parameter '{canonical_name(name)}' {reason}")
