"""Numbers from the device to the host without making either wait; the one place where the loop reads the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class AsyncScalars:
    """Begins copying scalars, or longer tensors, to the host at once; `values` waits for that copy only, not for later work."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        row = torch.cat([tensor.detach().to(torch.float64).reshape(-1) for tensor in tensors])
        self._event: torch.Event | None = None
        if row.device.type == "cpu":
            self._host = row
            return
        self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        self._host.copy_(row, non_blocking=True)
        self._event = torch.Event(row.device)
        self._event.record()

    def values(self) -> list[float]:
        """All numbers, in order."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
