"""Table of accelerators, with their peaks and memory, and the count of accelerators in this machine.

This is the only list of devices. MFU, `titan check` and the simulator's profiles
(titan/sim/hardware/*.toml) take peaks and memory from it.

Peaks are dense (no 2:4 sparsity) and at boost clock, as the vendors print them. If a datasheet
prints only the sparse figure, half of it counts. `memory_gib` is, to about 1%, the driver's figure,
so an "80 GB" H100 has 79.1. A device that is not in the table has no peak, and MFU is shown as n/a.
Imports no torch.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

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


def _device(
    name: str, pattern: str, *, tb_per_s: float, memory_gib: float, source: str, **tflops: float
) -> Hardware:
    """Return a row of the table. fp16 is as fast as bf16 on all of these devices."""
    tflops["fp16"] = tflops["bf16"]
    peak_flops = {_DTYPES[short]: value * 1e12 for short, value in tflops.items()}
    return Hardware(
        name=name,
        pattern=pattern,
        peak_flops=peak_flops,
        memory_gib=memory_gib,
        memory_bandwidth=tb_per_s * 1e12,
        source=source,
    )


_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_BLACKWELL = "NVIDIA Blackwell Architecture Technical Brief, per-GPU table"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, FP32 accumulation"
_CDNA3, _CDNA4 = "AMD CDNA 3 whitepaper and data sheet", "AMD CDNA 4 whitepaper and data sheet"

# fmt: off
# Short names keep a row of the table on one line.
_DTYPES = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "float8", "bf16": "bfloat16", "fp16": "float16", "tf32": "tfloat32", "fp32": "float32"}

HARDWARE: tuple[Hardware, ...] = (
    _device("h100-sxm", r"H100( SXM5)? 80GB HBM3", bf16=989, fp8=1979, tf32=494, fp32=67, memory_gib=79.1, tb_per_s=3.35, source=_H100),
    _device("h100-pcie", r"H100 PCIe", bf16=756, fp8=1513, tf32=378, fp32=51, memory_gib=79.1, tb_per_s=2.0, source=_H100),
    _device("h100-nvl", r"H100 NVL", bf16=835, fp8=1671, tf32=417, fp32=60, memory_gib=93.1, tb_per_s=3.9, source=_H100),
    # The device of published runs (titan/sim/hardware). Its driver's name is unknown, so it must be named.
    _device("h100-96g-500w", r"(?!)", bf16=989, fp8=1979, tf32=494, fp32=67, memory_gib=95.0, tb_per_s=2.4, source=_H100),
    _device("h200-sxm", r"H200( SXM5)?( 141GB HBM3e)?", bf16=989, fp8=1979, tf32=494, fp32=67, memory_gib=139.7, tb_per_s=4.8, source=_H200),
    _device("h200-nvl", r"H200 NVL", bf16=835, fp8=1671, tf32=417, fp32=60, memory_gib=139.7, tb_per_s=4.8, source=_H200),
    _device("gh200-96g", r"GH200 480GB", bf16=989, fp8=1979, tf32=494, fp32=67, memory_gib=94.5, tb_per_s=4.0, source="NVIDIA GH200 Grace Hopper Superchip datasheet"),
    _device("b200", r"B200", bf16=2250, fp8=4500, mxfp8=4500, nvfp4=9000, tf32=1125, fp32=75, memory_gib=178.3, tb_per_s=8.0, source=_BLACKWELL),
    _device("b300", r"B300( SXM6 AC)?", bf16=2250, fp8=4500, mxfp8=4500, nvfp4=13125, tf32=1125, fp32=75, memory_gib=267.7, tb_per_s=8.0, source="NVIDIA HGX B300 datasheet, an eighth"),
    _device("gb200", r"GB200", bf16=2500, fp8=5000, mxfp8=5000, nvfp4=10000, tf32=1250, fp32=80, memory_gib=184.3, tb_per_s=8.0, source="NVIDIA GB200 NVL72 datasheet, half a superchip"),
    _device("gb300", r"GB300", bf16=2500, fp8=5000, mxfp8=5000, nvfp4=15000, tf32=1250, fp32=80, memory_gib=276.6, tb_per_s=8.0, source="NVIDIA GB300 NVL72 datasheet, 1/72"),
    _device("a100-80g", r"A100-SXM4-80GB|A100 80GB PCIe", bf16=312, tf32=156, fp32=19.5, memory_gib=79.2, tb_per_s=2.039, source=_A100),
    _device("a100-40g", r"A100-(SXM4|PCIE)-40GB", bf16=312, tf32=156, fp32=19.5, memory_gib=39.4, tb_per_s=1.555, source=_A100),
    _device("l40s", r"L40S", bf16=362, fp8=733, tf32=183, fp32=91.6, memory_gib=44.4, tb_per_s=0.864, source="NVIDIA L40S datasheet"),
    _device("l4", r"L4", bf16=121, fp8=242, tf32=60, fp32=30.3, memory_gib=22.0, tb_per_s=0.3, source="NVIDIA L4 datasheet, half of the sparse figures"),
    _device("rtx-4090", r"GeForce RTX 4090", bf16=165.2, fp8=330.3, tf32=82.6, fp32=82.6, memory_gib=23.5, tb_per_s=1.008, source=_ADA),
    _device("rtx-3090", r"GeForce RTX 3090", bf16=71, tf32=35.6, fp32=35.6, memory_gib=23.6, tb_per_s=0.936, source="NVIDIA Ampere GA102 whitepaper, FP32 accumulation"),
    _device("mi300x", r"Instinct MI300X( VF| HF)?", bf16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4, memory_gib=192.0, tb_per_s=5.3, source=_CDNA3),
    _device("mi325x", r"Instinct MI325X( VF| HF)?", bf16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4, memory_gib=256.0, tb_per_s=6.0, source=_CDNA3),
    _device("mi355x", r"Instinct MI355X( VF| HF)?", bf16=2516.6, fp8=5033.2, mxfp8=5033.2, fp32=157.3, memory_gib=288.0, tb_per_s=8.0, source=_CDNA4),
)
# fmt: on


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


def _num_visible(variable: str) -> list[int]:
    """Return the number of devices that a variable names, in a list; an empty list if it is unset."""
    names = visible_devices(variable)
    return [] if names is None else [len(names)]
