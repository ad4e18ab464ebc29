"""Traces made by hand: kernels of given duration, schedules with equal stages, and profiles in which things are free."""

from __future__ import annotations

from collections.abc import Mapping

from titan.parallel.schedules import COSTS, Action, Schedule
from titan.sim.price.cost import Cost
from titan.sim.price.network import TransferPrice
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import (
    AwaitWork,
    CollectiveKind,
    Event,
    Group,
    Kernel,
    Launch,
    Scope,
    Trace,
    Transfer,
)

SCOPE = Scope("forward")
UNIT_US = 1000
"""A forward pass of one microbatch through one stage."""


class FixedCost(Cost):
    """Kernels last as many microseconds as they read bytes; transfers, as many as they have bytes; hosts and latency are free."""

    def __init__(self, profile: Profile | None = None, *, host_us: float = 0.0) -> None:
        free = {"compute_share_beside_transfer": 1.0, "transfer_share_beside_compute": 1.0, "speed_deviation": 0.0}  # fmt: skip
        super().__init__(profile or load_profile("h100-sxm").model_copy(update=free))
        self.host_us = host_us

    def kernel_s(self, kernel: Kernel) -> float:
        return kernel.read_bytes * 1e-6

    def launch_s(self, kernel: Kernel) -> float:
        return self.host_us * 1e-6

    @property
    def launch_transfer_s(self) -> float:
        return self.host_us * 1e-6

    @property
    def tiny_s(self) -> float:
        return 0.0

    def transfer(self, transfer: Transfer, group: Group, *, rank: int) -> TransferPrice:
        links = super().transfer(transfer, group, rank=rank).links
        return TransferPrice(0.0, transfer.size_bytes * 1e-6, links)


def kernel(us: int, name: str = "work") -> Kernel:
    return Kernel(name, "pointwise", read_bytes=us)


def launch(us: int, *, stream: int = 0, scope: Scope = SCOPE) -> Launch:
    return Launch(kernel(us), stream, scope)


def transfer(
    us: int,
    *,
    group: str,
    work: int,
    kind: CollectiveKind = "all_gather",
    stream: int = 0,
    detached: bool = True,
    peer: int = -1,
    scope: Scope = SCOPE,
) -> Transfer:
    return Transfer(kind, group, us, "bfloat16", stream, detached, work, scope, peer)


def trace(events: list, *groups: Group, rank: int = 0, world_size: int = 8) -> Trace:
    return Trace(rank, world_size, groups={group.name: group for group in groups}, step=events)


def pipeline(
    schedule: Schedule, *, send_us: int = 0, units: Mapping[str, int] = COSTS
) -> dict[int, Trace]:
    """A rank for each of the schedule's, on a node of its own: each action one kernel, and what it needs is received just before it.

    Every pair of stages has its own group and so its own queue, which is what theory assumes.
    """
    traces = {}
    owners = {s: rank for rank in range(schedule.num_ranks) for s in schedule.stages_of(rank)}
    for rank, actions in enumerate(schedule.order):
        maker = _Maker(rank * 8, {stage: owner * 8 for stage, owner in owners.items()}, send_us)
        for action in actions:
            maker.add(action, units[action.kind] * UNIT_US, last=schedule.num_stages - 1)
        traces[rank * 8] = Trace(
            rank * 8, 8 * len(schedule.order), maker.groups, step=maker.events
        )
    return traces


class _Maker:
    def __init__(self, rank: int, owners: Mapping[int, int], send_us: int) -> None:
        self.rank, self.owners, self.send_us = rank, owners, send_us
        self.events: list[Event] = []
        self.groups: dict[str, Group] = {}

    def add(self, action: Action, us: int, *, last: int) -> None:
        stage, kind, _ = action
        scope = Scope("forward" if kind == "F" else "backward", action=str(action))
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        if kind != "W" and 0 <= before <= last:
            self._move("recv", before, stage, scope)
        self.events.append(launch(us, scope=scope))
        if kind != "W" and 0 <= after <= last:
            self._move("send", stage, after, scope)

    def _move(self, kind: CollectiveKind, source: int, target: int, scope: Scope) -> None:
        """One side of passing on activations or gradients, unless both stages are here."""
        sender, receiver = self.owners[source], self.owners[target]
        if sender == receiver:
            return
        name = f"pp {source}-{target}"
        self.groups[name] = Group(name, ("pp", name), (sender, receiver))
        work = len(self.events)
        peer = receiver if kind == "send" else sender
        sent = transfer(self.send_us, group=name, work=work, kind=kind, peer=peer, scope=scope)
        self.events.append(sent)
        if kind == "recv":
            self.events.append(AwaitWork(0, work))
