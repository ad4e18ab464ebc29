"""Start of a rank: its device and its process group."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .torch_compat import limit_gloo, set_allocator

# Set by the launcher of a run on one machine: a folder that only its user can open (titan/ops/rendezvous.py).
STORE_FOLDER = "TITAN_STORE"


def usable_accelerator() -> torch.device | None:
    """Return this machine's accelerator if ranks on it can communicate, else None.

    Apple's accelerator (mps) has no communication backend, so its ranks use the CPU.
    """
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return device if device and dist.get_default_backend_for_device(device) != "gloo" else None


def start_process_group(
    *,
    init_timeout_s: float,
    expandable_segments: bool,
    host_tensors: bool = False,
) -> torch.device:
    """Start the process group, on the accelerator if there is one. Return this rank's device.

    If all ranks are on one machine, gloo listens on loopback only.

    Args:
        init_timeout_s: time limit of the default group's collectives, in seconds. The groups of meshes start with torch's own
            limits.
        expandable_segments: setting of the accelerator's caching allocator, unless an environment variable sets the allocator.
        host_tensors: let the groups of meshes also communicate tensors in host memory (parameters that FSDP keeps there).
    """
    # torch has two names for the variable, the older one with CUDA in it.
    if not ({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}):
        set_allocator(f"expandable_segments:{expandable_segments}")
    accelerator = usable_accelerator()
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # Ranks of one machine need no other address. Ranks of several machines need gloo's default device to reach each other.
    limit_gloo(loopback=world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    backend = dist.get_default_backend_for_device(device)
    # With a bound device, a mesh splits its groups off the default one: one call per axis, and NCCL shares resources.
    bound = None if device.type == "cpu" else device
    if bound is not None and host_tensors:
        # A split would copy gloo too, in C++ and with NCCL's options: limit_gloo would not see it. Without a bound
        # device, each group is made in Python.
        backend, bound = f"cpu:gloo,{device.type}:{backend}", None
    # Objects go over the accelerator. Only checkpoints have a gloo group, since a save in the background must not
    # mix with the collectives of training.
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=init_timeout_s),
        device_id=bound,
        **_store(world_size),
    )
    return device


def _store(world_size: int) -> dict[str, Any]:
    """Return the arguments of init_process_group that find the other ranks. None if torchrun's environment has them."""
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if (folder := os.environ.get(STORE_FOLDER)) is None:
        return {}
    # A file for each attempt: a restarted rank must not find the address of a dead one.
    path = Path(folder) / f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    # -1: torch leaves the file alone; the launcher deletes the folder.
    store = dist.FileStore(str(path), -1)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size}


def default_store() -> Any:
    """Return the store of the default process group, without its prefixes."""
    # Private in torch, but the same in 2.11 to 2.15.
    from torch.distributed.distributed_c10d import _get_default_store

    # A prefix store waits for its keys. The store below it has host, port and path.
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
