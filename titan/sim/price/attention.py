"""Kernel of attention that a job runs, by the rules of torch's sdp_utils.cpp. Imports no torch.

torch's order is FlashAttention-2, the memory-efficient kernel, plain operations, and cuDNN before them where
`check_prefer_cudnn_attention` says so:

    torch          cuDNN               compute capability
    2.5.0          9.0.1 or later      9.0 and above
    2.5.1 to 2.8   (never)             (pytorch 138522)
    2.9            9.9.0 or later      9.0, 10.0           (pytorch 162073)
    2.10           9.15.1 or later     9.0, 10.0           (pytorch 171895)
    since 2.11     9.15.1 or later     9.0, 10.0, 10.3     (pytorch 170800)

Wheels bring a cuDNN of their own. That of 2.10 is 9.10.2 for CUDA 12, which those of PyPI are for, and 9.15.1 for CUDA 13 (pytorch
171189). Since 2.11 it is 9.19 or later, but 9.10.2 for CUDA 12.6 (pytorch 177321).
"""

from __future__ import annotations

import re

FLEX = "FlexAttention"
_FLASH = {"flash": "flash2", "fa3": "flash3", "fa4": "flash4"}


def attention_kernel_of(
    backend: str, mask: str = "", *, torch_version: str, capability: float
) -> str:
    """Return the kernel that computes a job's attention in 16 bits: "cudnn", "flash2" to "flash4", "efficient", "math" or `FLEX`.

    Args:
        backend: `model.attention_backend`.
        mask: form of the mask, as for `under_mask`.
        torch_version: torch of the run, such as "2.11.0", "2.11.0+cu126", or "2.10.0+cudnn9.19.0" for another cuDNN than the wheel's.
        capability: compute capability of the device, such as 10.3.
    """
    kernel = _FLASH.get(backend, backend)
    if backend == "auto":
        kernel = "cudnn" if _prefers_cudnn(torch_version, capability) else "flash2"
    return under_mask(kernel, mask)


def under_mask(kernel: str, mask: str) -> str:
    """Return the kernel that computes attention with a mask, where `kernel` does without.

    Args:
        kernel: the kernel without a mask, or with a causal one.
        mask: "varlen": documents or windows as sequences, which FlashAttention takes. "flex": a block mask of FlexAttention. "dense": booleans,
            or values of another size than keys, which FlashAttention does not take. "": none of these.
    """
    is_flash = kernel in _FLASH.values()
    if mask == "flex":
        return FLEX
    if mask == "varlen":
        return kernel if is_flash else "flash2"
    return "efficient" if mask == "dense" and is_flash else kernel


def _prefers_cudnn(torch_version: str, capability: float) -> bool:
    """Return whether torch tries cuDNN first."""
    release, _, build = torch_version.partition("+")
    torch = _numbers(release)
    if torch < (2, 9):
        return torch == (2, 5, 0) and capability >= 9
    known = (9.0, 10.0) if torch < (2, 11) else (9.0, 10.0, 10.3)
    least = (9, 9) if torch < (2, 10) else (9, 15, 1)
    return capability in known and _cudnn(torch, build) >= least


def _cudnn(torch: tuple[int, ...], build: str) -> tuple[int, ...]:
    """Return the cuDNN of a build, or that of torch's wheel."""
    numbers = _numbers(build)
    if build.startswith("cudnn"):
        return numbers
    if torch < (2, 11):
        return (9, 15, 1) if numbers >= (130,) else (9, 10, 2)
    return (9, 10, 2) if numbers == (126,) else (9, 19)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: those of "2.10.0a0" are 2, 10, 0."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
