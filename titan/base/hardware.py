"""Table of accelerators (hardware.toml), with their peaks and memory, and the count of accelerators in this machine.

This is the only list of devices. MFU, `titan check` and the simulator's profiles
(titan/sim/hardware/*.toml) take peaks and memory from it.

Peaks are dense (no 2:4 sparsity) and at boost clock, as the vendors print them. If a datasheet
prints only the sparse figure, half of it counts. `memory_gib` is, to about 1%, the driver's figure,
so an "80 GB" H100 has 79.1. A device that is not in the table has no peak, and MFU is shown as n/a.
Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from titan.base.untrusted import InputError, tomllib

PROCESS_BYTES = 2**28
"""Memory of a process that has imported torch and titan, measured at 0.2 GiB."""
MARGIN = 0.1
"""Share of a device's memory that a job must leave free to "fit". Predictions of memory are off by a few percent, and
other needs (uneven routing, a longer validation, a neighbour's process) take room."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Kind of accelerator.

    Attributes:
        name: value of `hardware.name` in a job file.
        pattern: regular expression for the whole device name that the driver reports.
        peak_flops: FLOP/s by the dtype of a matmul's inputs. float32 is without TF32; mxfp8 is
            float8 with a scale for each 32 values, nvfp4 four bits with a scale for each 16.
        memory_gib: memory in GiB.
        memory_bandwidth: bytes/s.
        source: document with the figures.
    """

    name: str
    pattern: str
    peak_flops: dict[str, float]
    memory_gib: float
    memory_bandwidth: float
    source: str


def _read() -> Iterator[Hardware]:
    """Yield the rows of hardware.toml."""
    text = Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        tflops = {**row["tflops"], "float16": row["tflops"]["bfloat16"]}
        yield Hardware(
            name=name,
            pattern=row["pattern"],
            peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
            memory_gib=row["memory_gib"],
            memory_bandwidth=row["memory_tb_per_s"] * 1e12,
            source=row["source"],
        )


HARDWARE = tuple(_read())


def recognise(device_name: str) -> Hardware | None:
    """Return the row of a device; None if it is not in the table.

    The whole name must match: a MIG slice, a laptop part or a custom SKU has another peak.

    Args:
        device_name: the driver's name, such as "NVIDIA H100 80GB HBM3".
    """
    # Some drivers put the vendor first.
    bare = re.sub(r"^(NVIDIA|AMD)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    rows = (row for row in HARDWARE if re.fullmatch(row.pattern, bare, re.IGNORECASE))
    return next(rows, None)


def by_name(name: str) -> Hardware:
    """Return the row with a name.

    Raises:
        ValueError: there is no such row. The message lists all names.
    """
    row = next((row for row in HARDWARE if row.name == name.lower()), None)
    if row is None:
        known = ", ".join(row.name for row in HARDWARE)
        raise ValueError(f"hardware.name: no profile {name!r}; there are: {known}")
    return row


def usable_cores() -> int:
    """Return the number of cores that this process may use, which a container or a Slurm job may limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def fitting_processes() -> float:
    """Return the number of processes with torch that the free memory of this machine, and of its container, holds."""
    room = [math.inf]
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        room += [1024 * int(n) for n in re.findall(r"MemAvailable: *(\d+)", text)]
    with suppress(OSError, ValueError):  # "max": no limit
        names = ("max", "current", "stat")
        most, now, stat = (Path(f"/sys/fs/cgroup/memory.{n}").read_text() for n in names)
        # Pages of files are given away before a process is killed.
        room.append(int(most) - int(now) + int(re.findall(r"inactive_file (\d+)", stat)[0]))
    return min(room) // PROCESS_BYTES


def require_memory(option: str, count: int) -> None:
    """Check that the free memory holds further processes that import torch.

    Args:
        option: option that asks for them.
        count: number of processes.

    Raises:
        InputError: it holds fewer.
    """
    if count > (fit := fitting_processes()):
        need = f"{count} processes take {count * PROCESS_BYTES / 2**30:,.1f} GiB of memory"
        raise InputError(f"{option} {count}: {need}; here {fit:.0f} fit")


def count_accelerators() -> int:
    """Count the accelerators that this process may use, without importing torch.

    NVIDIA's are counted by their device files, AMD's by the nodes of their driver (KFD), and each
    only if the installed torch was built for them.
    """
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return 0
    if build.startswith("cpu"):
        return 0
    # Device files exist before a driver library is loaded. /dev/nvidiactl is not a device.
    nvidia = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if nvidia and not build.startswith("rocm"):
        names = visible_devices("CUDA_VISIBLE_DEVICES") or []
        is_split = any(name.startswith("MIG-") for name in names)  # one GPU may have several
        return len(names) if is_split else min([nvidia, *_num_visible("CUDA_VISIBLE_DEVICES")])
    # A torch from PyPI ("2.13.0", "2.13.0+cu130") is for NVIDIA. A build from source may be for AMD.
    if not build.startswith(("rocm", "git")):
        return 0
    # The runtime (ROCR) filters first. HIP then reads its own variable, or CUDA's if that is unset.
    hip = (
        "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    )
    return min([_num_amd(), *_num_visible("ROCR_VISIBLE_DEVICES"), *_num_visible(hip)])


def _num_amd() -> int:
    """Count the GPUs among KFD's nodes. CPUs are nodes too, with the id 0."""
    count = 0
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        with suppress(OSError):  # the driver refuses to read GPUs that a container may not use
            count += path.read_text().strip() != "0"
    return count


def visible_devices(variable: str) -> list[str] | None:
    """Return the devices that a variable names; None if it is unset.

    As in CUDA, an invalid name ends the list.
    """
    if (value := os.environ.get(variable)) is None:
        return None
    names = (name.strip() for name in value.split(","))
    return list(takewhile(lambda name: name not in ("", "-1"), names))


def device_share(number: int, size: int) -> dict[str, str]:
    """Return the environment of a child process that gets a part of this process's accelerators.

    Without accelerators it is empty.

    Args:
        number: number of the part.
        size: accelerators of each part.
    """
    if not (count := count_accelerators()):
        return {}
    # HIP reads CUDA's variable unless its own is set.
    variables = ["CUDA_VISIBLE_DEVICES", *({"HIP_VISIBLE_DEVICES"} & os.environ.keys())]
    names = {name: visible_devices(name) or [*map(str, range(count))] for name in variables}
    part = slice(number * size, (number + 1) * size)
    return {name: ",".join(devices[part]) for name, devices in names.items()}


def _num_visible(variable: str) -> list[int]:
    """Return the number of devices that a variable names, in a list; an empty list if it is unset."""
    names = visible_devices(variable)
    return [] if names is None else [len(names)]
