"""torch's private or moving names, in this one place; torch 2.11 to 2.15.

Each name says what it is, and where torch is known to differ. A torch that lacks one fails here at import,
with the name in the message, and not in the middle of a run.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# DDP on FSDP2's machinery. Not the older function of the same name in torch.distributed._composable, which
# wraps DistributedDataParallel and loses its parameters under tensor parallelism.
from torch.distributed._composable.replicate_with_fsdp import replicate

# Leaves state_dict's names alone; parameters' names get a part, see weights.canonical_name.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.distributed_c10d import _set_pg_timeout

__all__ = [
    "checkpoint_wrapper",
    "enable_symmetric_memory",
    "micro_pipeline_module",
    "replicate",
    "set_timeout",
]


def micro_pipeline_module() -> Any:
    """Where inductor looks up the pass `micro_pipeline_tp_pass` (by name, at each graph)."""
    from torch._inductor.fx_passes import post_grad

    assert hasattr(post_grad, "micro_pipeline_tp_pass"), f"torch {torch.__version__}"
    return post_grad


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """torch up to 2.13 rewrites only for groups that were announced; 2.15 finds them by itself and warns."""
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def set_timeout(timeout: timedelta) -> None:
    """Set the time limit of every process group's collectives from now on.

    gloo's sends and receives (pipeline parallelism on a CPU) keep the limit that their group was made with.
    """
    for group in dist.distributed_c10d._world.pg_map:
        _set_pg_timeout(timeout, group)
