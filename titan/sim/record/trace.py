"""Trace of one rank's training step, as data: the simulator records it, prices it and replays it.

    record    runs the program on fake tensors and writes a Trace        tracer.py
    price     seconds of a Kernel or a Transfer on some hardware         cost.py, network.py
    replay    streams, events and ranks on a clock; the allocator        queues.py, allocator.py

A trace does not depend on the hardware, so that it can be priced on any. Events stand in the order
in which the host issues them. Imports no torch.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, get_args

KernelKind = Literal[
    "matmul",  # aten.mm, bmm, _scaled_mm: shapes are those of the operands
    "attention",  # shapes of q, k, v: (B, H, S, K)
    "attention_backward",
    "recurrence",  # linear attention, forward or backward: shapes of q, v, gates and, with the delta rule, strengths, (B, S, H, ...)
    "pointwise",  # element by element, reductions, fused kernels: priced by bytes
    "gather",  # embedding and its backward, index
    "optimizer",  # fused or foreach updates and norms over many tensors
    "copy",  # within the device
    "host_copy",  # between device and host
]
CollectiveKind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "read",  # of a peer's memory, which takes no part in it
]
Host = Literal["eager", "compiled"]
Phase = Literal["setup", "forward", "backward", "recompute", "clip", "optimizer"]
# Purpose of memory; storages.py defines each category.
Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "unsharded", "temporary"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

RECURRENCE_CHUNK = 64
"""Positions that flash-linear-attention's kernels compute at once, with a state for each chunk in memory."""
COMPUTE_STREAM = 0
"""The device's default stream; other streams are numbered as they are made."""
HOST = -1
"""Number of the host, in place of a stream."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernel, with everything that its duration depends on.

    Equal kernels are one object within a trace.

    Attributes:
        name: torch's name ("aten::mm"), or "fused" and the fused operations.
        kind: kind, which decides the formula of its duration.
        shapes: shapes of the operands that the cost depends on. For an optimizer's operation over
            lists of tensors, the arguments of
        `list_launches`.
        dtype: data type of the first operand, as torch prints it without its "torch.".
        flops: multiplications and additions, causality not deducted.
        read_bytes: bytes that it reads.
        write_bytes: bytes that it writes.
        host: launcher of the kernel, which decides the host's time.
        num_launches: number of kernels that the operation is made of. A foreach over many tensors
            runs in several.
        causal: whether attention has a causal mask.
        transposes: whether a fused kernel reads along one dimension and writes along another.
    """

    name: str
    kind: KernelKind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    host: Host = "eager"
    num_launches: int = 1
    causal: bool = False  # attention under a causal mask
    transposes: bool = False


def attention_flops(kind: KernelKind, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the FLOPs of attention: two matmuls forward; five backward, including a repetition of the first.

    torch's formula does not support grouped heads in 2.11.
    """
    (batch, heads, queries, size), (*_, keys, _) = shapes[:2]
    # Queries and keys share a size, values may have another one (multi-head latent attention).
    both_sizes = size + shapes[min(2, len(shapes) - 1)][3]
    matmuls = 2 if kind == "attention" else 5
    return matmuls * batch * heads * queries * keys * both_sizes


def visible_keys(kernel: Kernel) -> float:
    """Return the mean number of keys that a query sees, in attention.

    Under a causal mask, query i sees keys 0 to i, as torch aligns it. Fewer queries than keys are those of a rank under context
    parallelism: they come from both ends of the sequence, so that they see half of the keys in the mean.
    """
    (*_, queries, _), (*_, keys, _) = kernel.shapes[:2]
    if not kernel.causal:
        return float(keys)
    if queries < keys:
        return (keys + 1) / 2
    # The triangle of the first queries, then the rows that see every key.
    return (keys * (keys + 1) / 2 + (queries - keys) * keys) / queries


_CHUNKS_AT_ONCE = 320  # MultiTensorApply.cuh


def list_launches(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of launches of an operation over lists of tensors.

    Args:
        shapes: ((launches of one pass, tensors in a launch), (tensors, chunks of 65,536 elements in
            them)).
    """
    (passes, at_once), (tensors, chunks) = shapes
    # A launch is full when it has its most tensors or its most chunks, whichever comes first.
    return passes * max(1, -(-tensors // at_once), -(-chunks // _CHUNKS_AT_ONCE))


@dataclass(frozen=True, slots=True)
class Scope:
    """Place in the program where an event happens.

    Attributes:
        phase: phase of the step.
        module: path of a module ("layers.3.attention.wq"), empty outside of the model.
        action: pipeline action, such as "2F0": forward of stage 2, microbatch 0.
        call: in a block that is recomputed operation by operation, the operation and its place
            among those of its name in the
        block ("aten.mm@2").
    """

    phase: Phase
    module: str = ""
    action: str = ""
    call: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Process group.

    Attributes:
        name: torch's name.
        axes: axes of the mesh, such as ("dp_shard", "cp").
        ranks: global ranks in order.
    """

    name: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


class _Event:
    """Event. A pickle holds its values without their names, since traces have millions of events."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Return the class and the values of all fields."""
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])


def scope_of(event: Any) -> Any:
    """Return the `Scope` of an event, or None of events that belong to no place in the program."""
    return getattr(event, "scope", None)


@dataclass(slots=True)
class Launch(_Event):
    """Launch of a kernel.

    Attributes:
        kernel: the kernel.
        stream: stream of the launch. On HOST, the host computes on its own memory.
        scope: place in the program.
    """

    kernel: Kernel
    stream: int
    scope: Scope


@dataclass(slots=True)
class Transfer(_Event):
    """Collective, or one side of a send and receive.

    Attributes:
        kind: kind of the collective.
        group: name of the process group.
        size_bytes: size of the gathered tensor (all_gather), of the unreduced tensor
            (reduce_scatter), or of this rank's message.
        dtype: data type, as in Kernel.
        stream: current stream.
        detached: whether the transfer runs on its group's own stream, which first waits for the
            current stream. If not, it
        occupies the current stream.
        work: number that an AwaitWork refers to. Transfers that share it were issued together.
        scope: place in the program.
        peer: global rank of the other side of a send, recv or read; -1 for collectives.
    """

    kind: CollectiveKind
    group: str
    size_bytes: int
    dtype: str
    stream: int
    detached: bool
    work: int
    scope: Scope
    peer: int = -1


@dataclass(slots=True)
class AwaitWork(_Event):
    """Wait of a stream for the transfers of a work. If `host` is set, the host waits, too."""

    stream: int
    work: int
    host: bool = False


@dataclass(slots=True)
class RecordEvent(_Event):
    """Recording of an event on a stream."""

    stream: int
    event: int


@dataclass(slots=True)
class AwaitEvent(_Event):
    """Wait of a stream for an event. With stream -1, the host waits."""

    stream: int
    event: int


@dataclass(slots=True)
class AwaitStream(_Event):
    """Wait of a stream for all work that another stream has been given so far."""

    stream: int
    other: int


@dataclass(slots=True)
class Synchronize(_Event):
    """Wait of the host for a stream, or for all streams with -1, because a value is read or the device is synchronised."""

    stream: int
    reason: str = ""


@dataclass(slots=True)
class Allocate(_Event):
    """Allocation of device memory.

    Attributes:
        block: number that is never used twice.
        size_bytes: requested size, not rounded.
        stream: current stream.
        category: purpose of the memory.
        scope: place in the program.
    """

    block: int
    size_bytes: int
    stream: int
    category: Category
    scope: Scope


@dataclass(slots=True)
class Free(_Event):
    """End of a block of device memory."""

    block: int


Event: TypeAlias = (
    Launch
    | Transfer
    | AwaitWork
    | RecordEvent
    | AwaitEvent
    | AwaitStream
    | Synchronize
    | Allocate
    | Free
)


BEGINS = (Allocate, RecordEvent, Transfer)
"""Events that give a block, an event or a work its number, by which other events refer to it."""


def number_of(event: Event) -> tuple[str, int] | None:
    """Return the field that names a block, event or work ("block", "event", "work") and its number; None for other events."""
    for name in ("block", "event", "work"):
        if hasattr(event, name):
            return name, getattr(event, name)
    return None


def outer_numbers(events: Iterable[Any]) -> set[tuple[str, int]]:
    """Return the blocks, events and works that events refer to, and that did not begin among them."""
    numbers = [(number_of(event), isinstance(event, BEGINS)) for event in events]
    begun = {number for number, begins in numbers if begins}
    return {number for number, _ in numbers if number} - begun


def left(events: Sequence[Event]) -> list[Event]:
    """Return the allocations that are not freed."""
    freed = {e.block for e in events if isinstance(e, Free)}
    return [e for e in events if isinstance(e, Allocate) and e.block not in freed]


@functools.cache
def compared_fields(kind: type) -> list[str]:
    """Return the fields of an event or a kernel except its number and its scope."""
    return [f.name for f in fields(kind) if f.name not in ("block", "event", "work", "scope")]


@dataclass(eq=False)
class Trace:
    """Program of one rank. It equals only itself, so that results can be cached by identity.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        groups: process groups by name.
        setup: allocations that remain after the model is built.
        first_step: allocations that remain after the first step, above all the optimizer's states.
        step: events of every later step.
        mesh: degrees by axis, of a script.
        tokens: tokens of a step over all ranks, of a script that states them.
        host: the host's pace by part of the program (host_meter.py), or nothing if it is not known.
    """

    rank: int
    world_size: int
    groups: dict[str, Group] = field(default_factory=dict)
    setup: list[Event] = field(default_factory=list)
    first_step: list[Event] = field(default_factory=list)
    step: list[Event] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    host: dict[str, float] = field(default_factory=dict)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn off Python's collector of cycles.

    Traces and their replay are millions of small objects without cycles, and looking for cycles
    takes half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
