"""Peak memory of a rank, from the accelerator's allocator, or on a CPU from the process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak since the last reset.

    Attributes:
        kind: "device" for the accelerator's caching allocator, "rss" for the resident memory of
            the process.
        reserved_gib: GiB that the allocator took from the device, which must fit; with "rss",
            GiB of the process since its start, which cannot be reset.
        active_gib: GiB of tensors; None with "rss".
    """

    kind: Literal["device", "rss"]
    reserved_gib: float
    active_gib: float | None = None


def peak_memory(*, reset: bool = False) -> PeakMemory:
    """Return the peak so far.

    Args:
        reset: whether to start a new peak, on an accelerator.
    """
    import torch

    from titan.parallel.init_distributed import usable_accelerator

    if usable_accelerator() is None:
        # A CPU has no allocator with statistics; the kernel knows the peak of the process.
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return PeakMemory(kind="rss", reserved_gib=peak_bytes / _GIB)
    # Read before the reset, which clears the peaks.
    stats = torch.accelerator.memory_stats()
    if reset:
        torch.accelerator.reset_peak_memory_stats()
    return PeakMemory(
        kind="device",
        reserved_gib=stats.get("reserved_bytes.all.peak", 0) / _GIB,
        active_gib=stats.get("active_bytes.all.peak", 0) / _GIB,
    )
