"""What one rank finds out about its device, its host and its links. All ranks call everything together, in the same order.

Rates are the best of a few repetitions: what a device can do, and not what it did while something else ran. Bus bandwidth is
counted as nccl-tests count it, so that figures of any number of ranks compare with a link's: an all-reduce of B bytes over n ranks in
t seconds is 2 (n - 1) / n B / t, an all-gather of B in all (n - 1) / n B / t.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import titan

MATMUL, COPY, LINK = "matrix product, ", "memory, copy", "link to a neighbour"
_REPEAT = 5
_DISK_BYTES = 2**25
# On a CPU small: tests and laptops, whose cores all ranks share.
_MATMUL = {"cpu": 384, "other": 8192}
_COPY_BYTES = {"cpu": 2**25, "other": 2**30}
_MESSAGE_BYTES = {"cpu": 2**22, "other": 2**28}
_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank's. rates: TFLOP/s of "matrix product, float32", GB/s (decimal) of all else; clock_s: its wall clock less rank 0's."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock_s: float
    rates: dict[str, float]
    disk: DiskFacts | None  # of the first rank of each host
    gpu: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """error: why nothing can be written, else empty."""

    folder: str
    free_gib: float
    write_gb_per_s: float = 0.0
    error: str = ""


def measure(
    *, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype, folder: Path
) -> RankFacts:
    """All of it. dtype: of the job's matrix products; folder: the run's."""
    is_cpu = device.type == "cpu"
    first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
    found: dict[str, Any] = {
        "clock_s": clock_offset(device),
        "disk": disk(folder) if first_here else None,
        "gpu": {} if is_cpu else _gpu_state(device, dtype),
    }
    dist.barrier()  # what is measured now is not disturbed by the slowest disk
    rates = {f"{MATMUL}{str(dtype).removeprefix('torch.')}": matmul_tflops(device, dtype)}
    rates[COPY] = copy_gb_per_s(device)
    rates |= link_gb_per_s(device) | axes_gb_per_s(mesh, device)
    return RankFacts(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        device="CPU" if is_cpu else torch.get_device_module(device).get_device_name(device),
        versions=versions(),
        rates=rates,
        **found,
    )


def versions() -> dict[str, str]:
    """What must be the same on all ranks."""
    found = {
        "titan": titan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda or torch.version.hip)}
        with suppress(ImportError, RuntimeError, AttributeError):
            from torch.cuda import nccl

            found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def clock_offset(device: torch.device) -> float:
    """Seconds that this host's clock is ahead of rank 0's, to about a barrier's length."""
    offsets = []
    for _ in range(_REPEAT):
        dist.barrier()
        mine = torch.tensor([time.time()], dtype=torch.float64, device=device)
        first = mine.clone()
        dist.broadcast(first, src=0)
        offsets.append((mine - first).item())
    return median(offsets)


def disk(folder: Path) -> DiskFacts:
    """Free space, and the speed of one file that is written and made durable."""
    probe = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    free_gib = 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(folder).free / 2**30
        start_s = time.perf_counter()
        with probe.open("wb") as file:
            file.write(os.urandom(2**20) * (_DISK_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        rate = _DISK_BYTES / (time.perf_counter() - start_s) / 1e9
        return DiskFacts(folder=str(folder), free_gib=free_gib, write_gb_per_s=rate)
    except OSError as error:
        return DiskFacts(folder=str(folder), free_gib=free_gib, error=error.strerror or str(error))
    finally:
        with suppress(OSError):
            probe.unlink()


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    n = _size(_MATMUL, device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / best_s(lambda: torch.mm(a, b), device, times=4) / 1e12


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read and written."""
    source = torch.zeros(_size(_COPY_BYTES, device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_s(lambda: target.copy_(source), device, times=2) / 1e9


def link_gb_per_s(device: torch.device) -> dict[str, float]:
    """Best of this rank's links to the ranks before and after it, each measured with no other traffic of its two ends.

    The best, since a slow rank makes its neighbours' one link slow, but both of its own. A single rank has none.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return {}
    block = torch.zeros(_size(_MESSAGE_BYTES, device), dtype=torch.uint8, device=device)
    rates = []
    for phase in (0, 1):
        dist.barrier()
        is_first = rank % 2 == phase
        peer = rank + 1 if is_first else rank - 1
        if world % 2 == 0:
            peer %= world

        if 0 <= peer < world:
            swap = partial(_there_and_back, block, peer, is_first)
            rates.append(2 * block.numel() / best_s(swap, device, times=1) / 1e9)
    return {LINK: max(rates)}


def _there_and_back(block: torch.Tensor, peer: int, is_first: bool) -> None:
    for sends in (is_first, not is_first):
        (dist.send if sends else dist.recv)(block, peer)


def axes_gb_per_s(mesh: DeviceMesh, device: torch.device) -> dict[str, float]:
    """Bus bandwidth along each axis of the job's mesh; all its groups at once, as in training."""
    found = {}
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        n = dist.get_world_size(group)
        if n == 1:
            continue
        size = _size(_MESSAGE_BYTES, device) // 4
        whole = torch.zeros(size - size % n, device=device)
        part = whole[: len(whole) // n].clone()
        num_bytes = whole.numel() * 4 * (n - 1) / n

        reduce = partial(dist.all_reduce, whole, group=group)
        gather = partial(dist.all_gather_into_tensor, whole, part, group=group)
        found[f"{axis} all-reduce"] = 2 * num_bytes / best_s(reduce, device, times=2) / 1e9
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is not in torch 2.11
            found[f"{axis} all-gather"] = num_bytes / best_s(gather, device, times=2) / 1e9
    return found


def best_s(work: Callable[[], object], device: torch.device, *, times: int) -> float:
    """Seconds of one call in the best of a few rounds, after one to warm up."""
    rounds = []
    for _ in range(_REPEAT + 1):
        _wait_for(device)
        start_s = time.perf_counter()
        for _ in range(times):
            work()
        _wait_for(device)
        rounds.append((time.perf_counter() - start_s) / times)
    return min(rounds[1:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _size(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu" if device.type == "cpu" else "other"]


def _gpu_state(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What nvidia-smi says of this device while it multiplies; nothing where there is no such tool."""
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    if not uuid or not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_SMI)}"]
    command.append("--format=csv,noheader,nounits")
    n = _size(_MATMUL, device)
    a = torch.randn(n, n, device=device).to(dtype)
    for _ in range(1000):  # a second or two of work
        torch.mm(a, a)
    try:
        line = subprocess.check_output(command, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    finally:
        _wait_for(device)
    return dict(zip(_SMI, map(str.strip, line.strip().split(",")), strict=False))
