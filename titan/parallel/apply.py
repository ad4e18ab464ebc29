"""The one place that says in which order techniques are applied to a model.

    pipeline split -> TP/SP -> CP -> EP -> float8 -> AC -> compile -> FSDP / HSDP / DDP

Inner to outer: what changes a layer's computation comes first, what changes how a block is run (recomputed,
compiled) next, and the wrapper that gathers parameters around a block's run is last, so that it sees everything
below it as one unit. This version has the last step; the others take their places here as they land.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .fsdp import apply_ddp, apply_fsdp
from .mesh import axis_size, submesh


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What to apply. param_dtype: precision of forward and backward; None: that of the parameters."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True


def parallelize(
    model: nn.Module, *, mesh: DeviceMesh, blocks: list[nn.Module], plan: ParallelPlan
) -> nn.Module:
    """Apply `plan` to `model` in place over `mesh` (built by `build_mesh`) and return it.

    A single rank without mixed precision stays a plain module. With it, the model is wrapped even for one
    rank: FSDP does the casting, so that one process and many compute in the same precision.
    """
    shard = submesh(mesh, "dp_shard", "cp", flatten=True)
    replicas = submesh(mesh, "dp_replicate")
    if shard is None and replicas is not None:
        apply_ddp(
            model,
            mesh=replicas,
            blocks=blocks,
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            cast_forward_inputs=False,
        )
    elif shard is not None or plan.param_dtype is not None:
        fsdp_mesh = shard or mesh
        if replicas is not None:
            assert axis_size(mesh, "cp") == 1, "HSDP with context parallelism is not built yet"
            fsdp_mesh = mesh["dp_replicate", "dp_shard"]
        apply_fsdp(
            model,
            mesh=fsdp_mesh,
            blocks=blocks,
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            reshard_after_forward=plan.reshard_after_forward,
            cast_forward_inputs=False,
        )
    return model
