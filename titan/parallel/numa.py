"""NUMA binding: the threads of a rank stay on the cores beside its GPU.

Memory of the other socket is slower to reach from these cores, and so is the GPU from the other cores.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch


def bind_to_node(device: torch.device) -> None:
    """Bind all threads of this process to the cores of the NUMA node that a CUDA device belongs to.

    Threads and processes that start later inherit the binding. Nothing changes if the host does not say which node that is.

    Args:
        device: the CUDA device of this rank.
    """
    properties = torch.cuda.get_device_properties(device)
    # ROCm's properties and Windows have no such names.
    with contextlib.suppress(AttributeError):
        domain, bus, slot = (
            getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")
        )
        bind_threads(node_cores(f"{domain:04x}:{bus:02x}:{slot:02x}.0"))


def node_cores(pci_address: str, *, system: Path = Path("/sys")) -> set[int]:
    """Return the cores of the NUMA node of a PCI device. Empty if the host does not say.

    Args:
        pci_address: such as "0000:1b:00.0".
        system: the folder of sysfs.
    """
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        # "0-3,8-11". A machine without nodes says -1, and a node may have memory but no cores.
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.split("-") for part in listed.split(",")]
        return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def bind_threads(cores: set[int]) -> None:
    """Bind each thread of this process to the given cores, within the cores that it may use already.

    A thread that may use none of them keeps its binding.

    Args:
        cores: numbers of the cores.
    """
    # Other systems than Linux have no such folder, and no cores were found on them.
    folders = Path("/proc/self/task").iterdir() if cores else ()
    for thread in [int(folder.name) for folder in folders]:
        # A scheduler or a user may have bound it more narrowly. It may have ended since it was listed.
        with contextlib.suppress(OSError):
            if allowed := os.sched_getaffinity(thread) & cores:
                os.sched_setaffinity(thread, allowed)
