"""Asynchronous copies of numbers between host and device. The training loop reads the device only here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AsyncScalars:
    """An asynchronous copy of scalars, or of longer tensors, to the host.

    `values` waits for this copy, and not for work that is queued after it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # One copy for all of them. float64 holds every float32 and every count of tokens exactly.
        row = torch.cat([tensor.detach().to(torch.float64).reshape(-1) for tensor in tensors])
        self._event: torch.Event | None = None
        if row.device.type == "cpu":
            self._host = row
            return
        # Only a copy to pinned memory is asynchronous.
        self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._host.copy_(row, non_blocking=True)
        self._event = torch.Event(row.device)
        self._event.record()

    def values(self) -> list[float]:
        """Return all numbers, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as an fp32 tensor on the device, without waiting for it.

    Only a copy from pinned memory is asynchronous (pytorch#120996).
    """
    row = torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type != "cpu")
    return row.to(device, non_blocking=True)
