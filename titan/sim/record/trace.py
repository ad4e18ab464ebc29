"""Define what one rank does in a training step as data: the simulator records it, prices it and replays it.

    record    runs the program on fake tensors and writes a Trace        tracer.py
    price     seconds of a Kernel or a Collective on some hardware       cost.py, network.py
    replay    streams, events and ranks on a clock; the allocator        replay.py, allocator.py

A trace knows nothing of hardware, so one trace serves all of it. Events stand in the order in which the host issues them.
Imports no torch.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

KernelKind = Literal[
    "matmul",  # aten.mm, bmm, _scaled_mm: shapes are those of the operands
    "attention",  # shapes of q, k, v: (B, H, S, K)
    "attention_backward",
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
Host = Literal[
    "eager",
    "dtensor",  # the same, after DTensor has looked where its parts are and what to do with them
    "compiled",
]
Phase = Literal["setup", "forward", "backward", "recompute", "clip", "optimizer"]
# Whose memory it is; storages.py says when which category holds.
Category = Literal["parameters", "gradients", "optimizer", "activations", "unsharded", "temporary"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

COMPUTE_STREAM = 0
"""The device's default stream; other streams are numbered as they are made."""
HOST = -1
"""In place of a stream: the host."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Hold all of a kernel that its duration depends on. Equal kernels are one object within a
    trace.

    name: as torch calls it ("aten::mm"), or "fused" and what it was fused of. shapes: of the operands that the cost depends on;
    of an optimizer's operation over lists of tensors, what `list_launches` asks.
    dtype: of the first operand, as torch prints it without its "torch.". flops: multiplications and additions, causality not
    deducted. host: what launched it, which is what it costs the host. num_launches: kernels that the operation is made of
    (a foreach over many tensors runs in several). transposes: a fused one that reads along one dimension and writes along another.
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


_CHUNKS_AT_ONCE = 320  # MultiTensorApply.cuh


def list_launches(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Count the launches of an operation over lists of tensors, from its `shapes`.

    These are ((launches of one pass, tensors that a launch takes), (tensors, chunks of 65,536 elements in them)).
    """
    (passes, at_once), (tensors, chunks) = shapes
    # A launch is full when it has its most tensors or its most chunks, whichever comes first.
    return passes * max(1, -(-tensors // at_once), -(-chunks // _CHUNKS_AT_ONCE))


@dataclass(frozen=True, slots=True)
class Scope:
    """Say where in the program something happens.

    phase: of the step. module: path of a module ("layers.3.attention.wq"), empty outside of the model. action: under
    pipeline parallelism, such as "2F0": forward of stage 2, microbatch 0. call: in a block that is recomputed operation by
    operation, the operation and its place among those of its name in the block ("aten.mm@2").
    """

    phase: Phase
    module: str = ""
    action: str = ""
    call: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Describe a process group. axes: of the mesh, such as ("dp_shard", "cp"). ranks: global ones,
    in order."""

    name: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Launch:
    """The host launches a kernel on a stream. On HOST, it computes by itself, with what is in its
    own memory."""

    kernel: Kernel
    stream: int
    scope: Scope


@dataclass(slots=True)
class Transfer:
    """The host issues a collective, or one side of a send and receive.

    size_bytes: of the gathered tensor (all_gather), of the unreduced one (reduce_scatter), else of the message of this rank.
    stream: the current one. If `detached`, it runs on a stream of its group's own, which first waits for this
    one; else it occupies this one. work: what an AwaitWork refers to; transfers that share one were issued together.
    peer: global rank, of a send, recv or read.
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
class AwaitWork:
    """A stream waits for transfers. If `host` is set, so does the host."""

    stream: int
    work: int
    host: bool = False


@dataclass(slots=True)
class RecordEvent:
    """The host records an event on a stream."""

    stream: int
    event: int


@dataclass(slots=True)
class AwaitEvent:
    """A stream waits for an event. With stream -1, the host does."""

    stream: int
    event: int


@dataclass(slots=True)
class AwaitStream:
    """A stream waits for all that another has been given so far."""

    stream: int
    other: int


@dataclass(slots=True)
class Synchronize:
    """The host waits for a stream, or with -1 for all of them: a value is read, or the device
    synchronised."""

    stream: int
    reason: str = ""


@dataclass(slots=True)
class Allocate:
    """Device memory begins to be used. block: a number never used twice. size_bytes: as asked for,
    not rounded."""

    block: int
    size_bytes: int
    stream: int
    category: Category
    scope: Scope


@dataclass(slots=True)
class Free:
    """Device memory is not used any more."""

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
"""What gives a block, an event or a work its number. Others refer to it by that."""


def number_of(event: Event) -> tuple[str, int] | None:
    """Return which block, event or work an event begins, ends or waits for: its field, and the number."""
    for name in ("block", "event", "work"):
        if hasattr(event, name):
            return name, getattr(event, name)
    return None


@functools.cache
def compared_fields(kind: type) -> list[str]:
    """Return the fields of an event or a kernel but its number and its scope."""
    return [f.name for f in fields(kind) if f.name not in ("block", "event", "work", "scope")]


@dataclass(eq=False)
class Trace:
    """Hold one rank's program. It equals only itself, so that what was found out about it can be
    cached by identity.

    setup: what is allocated when the model is built. first_step: what the first step allocates and leaves, the optimizer's state above
    all. step: every step apart from that. Of a script, mesh: the degrees by axis. tokens: of a step over all ranks, if it states them.
    """

    rank: int
    world_size: int
    groups: dict[str, Group] = field(default_factory=dict)
    setup: list[Event] = field(default_factory=list)
    first_step: list[Event] = field(default_factory=list)
    step: list[Event] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)
    tokens: int = 0


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn off Python's collector of cycles. Traces and their replay are millions of small objects, none of them in
    cycles, and looking for cycles takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
