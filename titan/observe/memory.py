"""How much memory a rank has needed: the accelerator's allocator, or on a CPU the process itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak since the last reset.

    kind "device": reserved_gib is what the caching allocator took from the device (what must fit), active_gib
    what tensors used of it. kind "rss": resident memory of the process since it started, which cannot be reset.
    """

    kind: Literal["device", "rss"]
    reserved_gib: float
    active_gib: float | None = None


def peak_memory(*, reset: bool = False) -> PeakMemory:
    """The peak so far; `reset` begins a new one (on an accelerator)."""
    import torch

    if not torch.accelerator.is_available():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return PeakMemory(kind="rss", reserved_gib=peak_bytes / _GIB)
    stats = torch.accelerator.memory_stats()
    if reset:
        torch.accelerator.reset_peak_memory_stats()
    return PeakMemory(
        kind="device",
        reserved_gib=stats.get("reserved_bytes.all.peak", 0) / _GIB,
        active_gib=stats.get("active_bytes.all.peak", 0) / _GIB,
    )
