"""Copies of the state in host memory, from which it is written while training goes on.

    async                   copy at once, into new memory
    async_with_pinned_mem   copy while the next step's forward and backward passes run, into buffers that are kept from save
                            to save, and pinned if there is an accelerator

In the second mode, the next change of the state must wait for the copy, so a hook waits before the optimizer's step. On an
accelerator the stream waits, not the host. On a CPU the writer's thread makes the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.tensors import StateDict

_ALLOCATION, _ALIGNED = 2**30, 512  # bytes


class Staging:
    """Copies of one rank's state, one at a time.

    Attributes:
        waited_s: seconds that the last `before_update` waited.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self.buffers: StateDict = {}
        self._pending: Callable[[], object] | None = None
        self.waited_s = 0.0

    def begin(self, state: StateDict) -> Callable[[], StateDict]:
        """Copy `state`, or start to copy it. Return a function that the writer's thread calls for the finished copy."""
        self.waited_s = 0.0
        # In the second mode, use the buffers of the previous save again.
        copies = self.buffers if _are_alike(self.buffers, state) else self._allocate(state)
        if not self._overlap:
            # The writer reads at once, without waiting for an event. So the host must wait for each copy here.
            _copy(state, copies, non_blocking=False)
            return lambda: copies
        # Keep the buffers for the next save, because pinning memory is slow.
        self.buffers = copies
        devices = {value.device for value in state.values()} - {torch.device("cpu")}
        if devices:
            return self.copy_on_stream(state, copies, devices.pop())
        copied = threading.Event()
        # `before_update` calls this on the training thread.
        self._pending = copied.wait

        def finish() -> StateDict:
            try:
                _copy(state, copies, non_blocking=False)
            finally:
                copied.set()  # after a failure too, or training would wait for ever
            return copies

        return finish

    def before_update(self, *_: Any) -> None:
        """Wait until the state is copied. This is a hook of optimizers, which change the state next."""
        if self._pending is not None:
            start = time.monotonic()
            self._pending()
            self._pending, self.waited_s = None, time.monotonic() - start

    def copy_on_stream(
        self, state: StateDict, copies: StateDict, device: torch.device
    ) -> Callable[[], StateDict]:
        module = torch.get_device_module(device)
        stream, training = module.Stream(device), module.current_stream(device)
        stream.wait_stream(training)  # the step that is saved may still be running
        with module.stream(stream):
            _copy(state, copies, non_blocking=True)
        copied = stream.record_event()
        # The device waits, and the host goes on.
        self._pending = lambda: module.current_stream(device).wait_event(copied)

        def finish() -> StateDict:
            copied.synchronize()
            return copies

        return finish

    def _allocate(self, state: StateDict) -> StateDict:
        copies = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
        pinned = [_local(copies[n]) for n, value in state.items() if value.device.type != "cpu"]
        if self._overlap:
            share_memory(pinned, partial(torch.empty, dtype=torch.uint8, pin_memory=True))
        return copies


def _are_alike(copies: StateDict, state: StateDict) -> bool:
    def shapes(values: StateDict) -> list[Any]:
        return [(name, value.shape, value.dtype) for name, value in values.items()]

    return shapes(copies) == shapes(state)


def share_memory(tensors: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> None:
    """Move tensors into a few large allocations, since the allocator of pinned memory rounds each one up to a power of two.

    Args:
        tensors: tensors to move, in place.
        allocate: returns uint8 memory of a number of bytes.
    """
    left = torch.empty(0, dtype=torch.uint8)
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        if size > len(left):
            left = allocate(max(size, min(sum(sizes[number:]), _ALLOCATION)))
        place, left = left[: tensor.nbytes], left[size:]
        # pyrefly: ignore[bad-argument-type]
        tensor.set_(place.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def _copy(state: StateDict, copies: StateDict, *, non_blocking: bool) -> None:
    for name, value in state.items():
        _local(copies[name]).copy_(_local(value), non_blocking=non_blocking)


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    # With gradients enabled, `to_local` returns a view, whose memory can be replaced without a change of the tensor's.
    return value.to_local() if isinstance(value, DTensor) else value
