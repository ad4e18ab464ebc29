"""Recording of collectives, sends and receives: the bytes and the group of each, and the waits for it.

torch.distributed's own calls (c10d) run on the current stream unless they are asynchronous.
Functional calls (_c10d_functional, which DTensor uses) always run on their group's stream, and
`wait_tensor` waits for them. A send or receive that is issued alone goes through a communicator of
its two ranks, because NCCL makes one for each pair.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.sim.record import torch_compat
from titan.sim.record.operators import argument_of, tensors_in
from titan.sim.record.trace import AwaitWork, CollectiveKind, Event, Group, Scope, Transfer

# c10d's operators and functional ones, without their namespace. c10d's have an underscore at the end, and some at the beginning.
_NAME = re.compile(
    r"_?(shard_dim_)?(?P<kind>all_?gather|all_?reduce|all_?to_?all|reduce_scatter|broadcast|send|recv)"
    r"(_base|_into_tensor|_tensor|_single)?(_coalesced|_out)?_?"
)
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


class UnknownCollective(RuntimeError):
    """Collective whose name the simulator does not know."""


@dataclass
class Collective:
    """Operator of a collective, with the indices of its arguments; -1 for a missing argument.

    Attributes:
        kind: kind of the collective.
        data: argument whose bytes count; -1 for the result.
        group: argument that names the process group.
        asynchronous: argument that makes the call asynchronous.
        peer: argument with the rank of the other side.
        functional: whether this is a functional collective.
    """

    kind: CollectiveKind
    data: int
    group: int
    asynchronous: int
    peer: int
    functional: bool


def collective_of(func: Any) -> Collective | None:
    """Return the description of a collective's operator, or None for other operators.

    Raises:
        UnknownCollective: The name of the collective is not known.
    """
    if func.namespace not in _NAMESPACES:
        return None
    names = [a.name for a in func._schema.arguments]

    def index(*beginnings: str) -> int:
        # c10d's operators and the functional ones name their arguments differently.
        return next((i for i, n in enumerate(names) if n.startswith(beginnings)), -1)

    match = _NAME.fullmatch(func._opname)
    if match is None:
        raise UnknownCollective(
            f"{func._schema.name} is not among the collectives that the simulator knows"
        )
    plain = match["kind"].replace("_", "")
    kind = next(kind for kind in get_args(CollectiveKind) if kind.replace("_", "") == plain)
    return Collective(
        kind,
        # An all-gather counts its whole output, a reduce-scatter its whole input. Functional collectives return the output.
        data=index("output_tensor", "outputs")
        if kind == "all_gather"
        else index("tensor", "input"),
        group=index("process_group", "group_name"),
        asynchronous=index("asyncOp", "async_op"),
        peer=index("dst", "src") if kind in ("send", "recv") else -1,
        functional=func.namespace != "c10d",
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of tensors."""
    return sum(t.numel() * t.dtype.itemsize for t in tensors)


class Transfers:
    """Collectives of a program, as events with numbered works.

    Attributes:
        groups: process groups by name.
        shift: distance from this process's rank to the rank that it acts as.
        degrees: degree of each axis of the mesh.
    """

    def __init__(self, record: Callable[[Event], None], *, stream: Callable[[], int]) -> None:
        self.record, self.stream = record, stream
        self.groups: dict[str, Group] = {}
        self.shift = 0  # from this process's rank to the one that it acts as
        self.degrees = {"world": dist.get_world_size()}
        # 0 stands for no work.
        self._axes_by_name: dict[str, tuple[str, ...]] = {}  # of groups of other meshes
        self._axes_by_ranks: dict[tuple[int, ...], tuple[str, ...]] = {}  # of the same groups
        self._works = count(1)
        self._waited: dict[int, int] = {}  # by address of a functional result's storage
        self._batch = 0  # the work of the transfers that are being issued together
        self._patch_works()

    def note_mesh(self, mesh: DeviceMesh) -> None:
        """Name groups by the axes of this mesh, if it spans all ranks and is finer than the meshes before it."""
        names = tuple(mesh.mesh_dim_names or ())
        finer = [*self.degrees] == ["world"] or len(names) > len(self.degrees)
        if names and finer and mesh.size() == dist.get_world_size():
            self.degrees = dict(zip(names, mesh.shape, strict=True))

    def with_names(self, build: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
        """Wrap a function that builds another mesh over the same ranks, so that its groups are named by its axes.

        All programs of a process get one mesh: their traces must name the same groups.
        """

        @functools.cache
        def built(mesh: DeviceMesh, **degrees: int) -> DeviceMesh:
            mesh = build(mesh, **degrees)
            for axis in mesh.mesh_dim_names or ():
                group = mesh.get_group(axis)
                self._axes_by_name[group.group_name] = (axis,)
                self._axes_by_ranks[tuple(dist.get_process_group_ranks(group))] = (axis,)
            return mesh

        return built

    def begin(self, shift: int) -> None:
        """Begin another rank, at this distance from the process's own."""
        self.groups, self.shift = {}, shift

    def issue(
        self,
        collective: Collective,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        scope: Scope,
    ) -> None:
        """Record a call of a collective."""

        def argument(index: int) -> Any:
            return argument_of(func, index, args, kwargs)

        data = list(
            tensors_in([result] if collective.data < 0 else [argument(collective.data)])
        )
        # Tensors of the host only: nothing goes over the accelerator's network.
        if not any(t.fake_device.type != "cpu" for t in data):
            return
        size = _bytes_of(data)
        # A rank may receive more tokens than it sends, or fewer: the larger part sets the time.
        if collective.kind == "all_to_all":
            size = max(size, _bytes_of(tensors_in([result])))
        group = self._group(argument(collective.group))
        peer = group.ranks[argument(collective.peer)] if collective.peer >= 0 else -1
        # Sends and receives within a batch stay in the group's communicator.
        if peer >= 0 and not self._batch:
            group = self._pair(group, peer)
        work = self._batch or next(self._works)
        # Off the current stream run functional collectives, batches, point-to-point transfers, and
        # asynchronous calls.
        detached = collective.functional or bool(self._batch) or peer >= 0
        if collective.asynchronous >= 0:
            detached |= bool(argument(collective.asynchronous))
        self._record(collective.kind, group, size, data[0], detached, work, scope, peer)
        # Who waits for it: a functional result by its storage, all others by their handle.
        if collective.functional:
            for tensor in tensors_in([result]):
                self._waited[tensor.untyped_storage()._cdata] = work
        else:
            handle = result[-1] if isinstance(result, tuple | list) else result
            # The handle has a field for a sequence number, which `wait` below reads.
            self._fake_work.unbox(handle).seq_id = work

    def finish(self, tensor: Tensor) -> None:
        """Record that the current stream waits for a tensor, if it is the result of a functional collective."""
        self._wait(self._waited.pop(tensor.untyped_storage()._cdata, 0))

    def is_awaited(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the result of a functional collective that still runs."""
        return bool(self._waited) and tensor.untyped_storage()._cdata in self._waited

    def number_of_work(self) -> int:
        """Return a number that no work has yet."""
        return next(self._works)

    def repeat(self, transfer: Transfer, *, work: int, scope: Scope, shift: int) -> None:
        """Issue an earlier transfer again. No transfer goes to another stage.

        Args:
            transfer: the earlier transfer.
            work: number of the new work.
            scope: scope of the new transfer.
            shift: distance of the rank that issued it from this process's rank.
        """
        # Stages are the slowest axis, so ranks of another stage are at a fixed distance.
        moved = self.shift - shift
        peer = transfer.peer + moved if transfer.peer >= 0 else -1
        # The group must be known in this rank's trace too.
        self._group(transfer.group)
        self.record(replace(transfer, work=work, scope=scope, peer=peer))

    def read(self, data: Tensor, group_name: str, peer: int, *, scope: Scope) -> None:
        """Record a read of `data`'s bytes from the memory of a rank of a group."""
        group = self._group(group_name)
        # `peer` counts within the group.
        source, work = group.ranks[peer], next(self._works)
        self._record("read", group, _bytes_of([data]), data, False, work, scope, source)

    def _record(
        self, kind: CollectiveKind, group: Group, size: int, data: Tensor, *more: Any
    ) -> None:
        """Record a transfer of `size` bytes on the current stream. `more`: the fields of Transfer after its stream."""
        self.record(Transfer(kind, group.name, size, str(data.dtype)[6:], self.stream(), *more))

    def _wait(self, work: int) -> None:
        """Record that the current stream waits for a work. 0 is that of a transfer that was not recorded."""
        if work > 0:
            self.record(AwaitWork(self.stream(), work))

    def _group(self, group: Any) -> Group:
        """Return a process group by its name or its object, with the ranks of the rank that this process acts as."""
        if isinstance(group, str):
            group = torch_compat.resolve_group(group)
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        name = group.group_name
        if name not in self.groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            axes = self._axes_by_name.get(name) or self._axes_of(ranks)
            # A part of the mesh's axes: FSDP's group for reduce-scatters is a second one of another mesh's ranks.
            if math.prod(self.degrees.get(axis, 0) for axis in axes) > len(ranks):
                axes = self._axes_by_ranks.get(ranks, axes)
            # This process stands for the rank of another stage, whose groups are its own, moved. A
            # pipeline's group holds both already.
            if "pp" not in axes:
                ranks = tuple(rank + self.shift for rank in ranks)
            self.groups[name] = Group(name, axes, ranks)
        return self.groups[name]

    def _pair(self, group: Group, peer: int) -> Group:
        """Return the group of two ranks, for a send or receive that is issued alone."""
        first, second = sorted((dist.get_rank() + self.shift, peer))
        name = f"{group.name}: {first} and {second}"
        return self.groups.setdefault(name, Group(name, group.axes, (first, second)))

    def _axes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Return the axes along which ranks differ. The last axis of the mesh varies fastest."""
        varying, size = [], 1
        for axis, degree in reversed(self.degrees.items()):
            # A rank's coordinate along the axis, which is the same for all ranks if the group does
            # not extend along it.
            if len({rank // size % degree for rank in ranks}) > 1:
                varying.append(axis)
            size *= degree
        return tuple(reversed(varying))

    def _patch_works(self) -> None:
        """Report waits, and give sends and receives that are issued together one work."""
        work_class, self._fake_work, group_class = torch_compat.work_classes()

        def wait(work: Any, *_: Any) -> bool:
            self._wait(work.seq_id)
            return True

        # Both classes define the method.
        work_class.wait = self._fake_work.wait = wait
        start, end = group_class._start_coalescing, group_class._end_coalescing

        def begin(group: Any, device: Any) -> Any:
            # Between start and end, all sends and receives get this work.
            self._batch = next(self._works)
            return start(group, device)

        def finish(group: Any, device: Any) -> Any:
            work = end(group, device)
            work.seq_id, self._batch = self._batch, 0
            return work

        group_class._start_coalescing, group_class._end_coalescing = begin, finish
