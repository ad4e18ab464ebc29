"""Asynchronous tensor parallelism on the fake device: torch's fused collectives and matmuls, as on CUDA.

Inductor's pass puts symm_mem.fused_all_gather_matmul and the like into compiled graphs
(titan/parallel/async_tp.py). torch implements them in Python for CUDA: one chunk for each rank, on
two streams in turn. Each chunk is read from a peer's memory before its matmul, or read by a peer
after it; with barriers in between. That code runs here, with placeholders for the memory of peers.
A read of that memory is recorded as a transfer of kind "read" on the current stream, a barrier as a
kernel without bytes.

The workspace that peers read from is not recorded, since it does not come from the caching
allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan.sim.record import device, torch_compat
from titan.sim.record.operators import EXPANDED
from titan.sim.record.trace import Kernel

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer

_MODULE = "torch.distributed._symmetric_memory"
_FUSED = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)
# torch signals peers by a kernel that spins on flags in their memory.
_BARRIER = Kernel("symm_mem::barrier", "pointwise", host="compiled")
_copy = torch.ops.aten.copy_.default


def install(tracer: Tracer) -> None:
    """Make the fused operations run torch's own decomposition for CUDA."""
    # torch alternates chunks between the current stream and a second one, so that a copy hides
    # behind a matmul.
    stream = device.Stream(number=device.SECOND_STREAM)
    torch_compat.replace(_MODULE, "_get_backend_stream", lambda _: lambda priority=0: stream)
    torch_compat.replace(
        _MODULE,
        "get_symm_mem_workspace",
        lambda _: lambda name, min_size: _Workspace(tracer, name),
    )
    # torch 2.15 asks for an accelerator's allocator of it, earlier versions ask whether the group was announced.
    announced = torch_compat.find(_MODULE, "_group_name_to_store")
    torch_compat.replace(
        _MODULE, "is_symm_mem_enabled_for_group", lambda _: announced.__contains__
    )
    # The implementation names torch.cuda directly where it should ask for the tensor's device.
    torch.cuda.current_stream = lambda *_: device.current()  # pyrefly: ignore[bad-assignment]
    # torch delays one of the two streams with it by some cycles, too few to count.
    torch.cuda._sleep = lambda cycles: None
    for name in _FUSED:
        operator = getattr(torch.ops.symm_mem, name).default
        # Compiled programs call the operator; the tracer looks it up in EXPANDED.
        EXPANDED[operator] = _with_peers(tracer, torch_compat.find(_MODULE, f"_{name}"))


def _with_peers(tracer: Tracer, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the implementation of a fused operation, so that reads of peers' memory are recorded."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Reads(tracer):
            return implementation(*args, **kwargs)

    return run


class _Workspace:
    """Placeholder of the symmetric memory of all ranks of a group."""

    def __init__(self, tracer: Tracer, group_name: str) -> None:
        group = torch_compat.resolve_group(group_name)
        self.tracer, self.group_name = tracer, group_name
        self.rank, self.world_size = group.rank(), group.size()

    def barrier(self, channel: int = 0) -> None:
        """Record the kernel of a barrier."""
        self.tracer.launch(_BARRIER)

    def get_buffer(
        self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        """Return a tensor in the memory of a rank, marked if the rank is a peer."""
        # Memory of peers is made outside the record: it takes no space on this device.
        with self.tracer.pause():
            buffer: Any = torch.empty(sizes, dtype=dtype, device=device.NAME)
        if rank != self.rank:
            # `_Reads` below recognises reads of a peer by this mark.
            buffer.peer = (self.group_name, rank)
        return buffer


class _Reads(TorchDispatchMode):
    """Dispatch mode that records a copy from a peer's memory as a transfer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        peer = getattr(args[1], "peer", None) if func is _copy else None
        if peer is None:
            return func(*args, **(kwargs or {}))
        # The copy itself does not run: the transfer is its price, and its target holds no values.
        self.tracer.transfers.read(args[0], *peer, scope=self.tracer.scopes.current())
        return args[0]
