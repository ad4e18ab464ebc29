"""torch's private or moving names, in this one place; torch 2.11 to 2.15.

Each name says what it is, and where torch is known to differ. A torch that lacks one fails here at import,
with the name in the message, and not in the middle of a run.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# DDP on FSDP2's machinery. Not the older function of the same name in torch.distributed._composable, which
# wraps DistributedDataParallel and loses its parameters under tensor parallelism.
from torch.distributed._composable.replicate_with_fsdp import replicate

# Leaves state_dict's names alone; parameters' names get a part, see weights.canonical_name.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.distributed_c10d import _set_pg_timeout

__all__ = ["checkpoint_wrapper", "replicate", "set_timeout"]


def set_timeout(timeout: timedelta) -> None:
    """Set the time limit of every process group's collectives from now on."""
    for group in dist.distributed_c10d._world.pg_map:
        _set_pg_timeout(timeout, group)
