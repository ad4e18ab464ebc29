"""The first thing a rank does: find its device and the others."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from .shims import set_allocator


def start_process_group(*, init_timeout_s: float, expandable_segments: bool) -> torch.device:
    """Start the process group, on the accelerator if there is one; returns this rank's device.

    expandable_segments: of its caching allocator, unless the environment says something of it.
    """
    if not ({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}):
        set_allocator(f"expandable_segments:{expandable_segments}")
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        timeout=timedelta(seconds=init_timeout_s),
        device_id=None if device.type == "cpu" else device,
        **store,
    )
    return device
