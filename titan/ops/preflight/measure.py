"""Measurements of one rank's device, host and links. All ranks call everything together, in the same order."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import titan
from titan.ops import bench
from titan.sim.price.attention import attention_kernel_of

MATMUL, COPY, LINK = "matrix product, ", "memory, copy", "link to a neighbour"
# An odd number of repetitions, for their median.
_REPEAT = 5
_DISK_BYTES = 2**25
# Small on a CPU: tests and laptops, whose cores all ranks share.
_MATMUL = {"cpu": 384, "other": 8192}
_COPY_BYTES = {"cpu": 2**25, "other": 2**30}
MESSAGE_BYTES = {"cpu": 2**22, "other": 2**28}
_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts of one rank.

    Attributes:
        rank: the rank.
        host: name of its host.
        device: name of its device.
        versions: versions of software.
        clock_s: its wall clock minus rank 0's.
        rates: TFLOP/s of "matrix product, float32", GB/s (decimal) of all other rates.
        disk: facts of the run's disk, on the first rank of each host.
        gpu: answers of nvidia-smi.
        groups: ranks of its group along each axis.
    """

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock_s: float
    rates: dict[str, float]
    disk: DiskFacts | None
    gpu: dict[str, str]
    groups: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Facts of a disk.

    Attributes:
        folder: run folder.
        free_gib: free space.
        write_gb_per_s: speed of a durable write.
        error: why nothing can be written; empty if it can.
    """

    folder: str
    free_gib: float
    write_gb_per_s: float = 0.0
    error: str = ""


def measure(
    *, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype, folder: Path
) -> RankFacts:
    """Measure everything on this rank.

    Args:
        device: this rank's device.
        mesh: device mesh of the job.
        dtype: dtype of the job's matmuls.
        folder: run folder.
    """
    is_cpu = device.type == "cpu"
    # One rank of each host checks the shared disk.
    first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
    of_host: dict[str, Any] = {
        "clock_s": clock_offset(device),
        "disk": disk(folder) if first_here else None,
        "gpu": {} if is_cpu else _gpu_state(device, dtype),
    }
    dist.barrier()  # so that the slowest disk does not disturb the next measurements
    # The best of a few rounds, since other work may slow some of them.
    n, num_bytes = _size(_MATMUL, device), _size(_COPY_BYTES, device)
    product_s = min(bench.rounds_s(bench.matmul(device, dtype, width=n), device, calls=4))
    rates = {f"{MATMUL}{str(dtype).removeprefix('torch.')}": 2 * n**3 / product_s / 1e12}
    # A copy reads and writes.
    copy_s = min(bench.rounds_s(bench.copy(device, num_bytes), device, calls=2))
    rates[COPY] = 2 * num_bytes / copy_s / 1e9
    message_bytes = _size(MESSAGE_BYTES, device)
    if link := bench.link_gb_per_s(device, message_bytes):
        rates[LINK] = link
    groups: dict[str, list[int]] = {}
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if dist.get_world_size(group) > 1:
            groups[axis] = dist.get_process_group_ranks(group)
            kinds = ("all-reduce", "all-gather")
            by_kind = bench.collectives_gb_per_s(
                device, message_bytes, kinds=kinds, group=group
            )
            rates |= {f"{axis} {kind}": rate for kind, rate in by_kind.items()}
    return RankFacts(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        device="CPU" if is_cpu else torch.get_device_module(device).get_device_name(device),
        versions=versions(),
        rates=rates,
        groups=groups,
        **of_host,
    )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks, and the kernel of attention that follows from them."""
    versions_here = {
        "titan": titan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        versions_here |= {"cuda": str(torch.version.cuda or torch.version.hip)}
        cudnn = torch.backends.cudnn.version() or 0  # 91501 is 9.15.1
        build = f"{torch.__version__.split('+')[0]}+cudnn{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        major, minor = torch.cuda.get_device_capability()
        kernel = attention_kernel_of("auto", torch_version=build, capability=major + minor / 10)
        versions_here |= {"cudnn": build.partition("cudnn")[2], "attention": kernel}
        # Not all builds of torch have NCCL.
        with suppress(ImportError, RuntimeError, AttributeError):
            from torch.cuda import nccl

            versions_here["nccl"] = ".".join(map(str, nccl.version()))
    return versions_here


def clock_offset(device: torch.device) -> float:
    """Return the seconds that this host's clock is ahead of rank 0's, to about a barrier's length."""
    offsets = []
    for _ in range(_REPEAT):
        # After a barrier ranks go on at nearly the same time.
        dist.barrier()
        mine = torch.tensor([time.time()], dtype=torch.float64, device=device)
        first = mine.clone()
        dist.broadcast(first, src=0)
        offsets.append((mine - first).item())
    return median(offsets)


def disk(folder: Path) -> DiskFacts:
    """Measure free space, and the speed of a durable write of one file."""
    probe = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    free_gib = 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(folder).free / 2**30
        start_s = time.perf_counter()
        with probe.open("wb") as file:
            # Random bytes: some file systems compress, or do not store zeros.
            file.write(os.urandom(2**20) * (_DISK_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        rate = _DISK_BYTES / (time.perf_counter() - start_s) / 1e9
        return DiskFacts(folder=str(folder), free_gib=free_gib, write_gb_per_s=rate)
    except OSError as error:
        return DiskFacts(
            folder=str(folder), free_gib=free_gib, error=error.strerror or str(error)
        )
    finally:
        with suppress(OSError):
            probe.unlink()


def _size(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu" if device.type == "cpu" else "other"]


def _gpu_state(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the answers of nvidia-smi about this device under load; {} without that tool."""
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    if not uuid or not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_SMI)}"]
    command.append("--format=csv,noheader,nounits")
    n = _size(_MATMUL, device)
    a = torch.randn(n, n, device=device).to(dtype)
    # Clocks drop when a GPU idles, so they are read under load.
    for _ in range(1000):  # a second or two of work
        torch.mm(a, a)
    try:
        line = subprocess.check_output(command, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    finally:
        torch.accelerator.synchronize(device)
    return dict(zip(_SMI, map(str.strip, line.strip().split(",")), strict=False))
