"""Transfers of the replay: where their sides wait for each other, and how they share links.

A transfer between traced ranks (of different pipeline stages) begins when all of them have reached
it. Peers without a trace do the same as the traced rank, and arrive with it. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from titan.sim.price.cost import Cost
from titan.sim.price.network import TransferPrice
from titan.sim.record.trace import Group, Transfer

from .clock import Clock, ReplayError, Work
from .streams import TransferBatch
from .timeline import Interval, axis_of


@dataclass(slots=True, eq=False, kw_only=True)
class Flow(Work):
    """A transfer that all sides have reached. Its latency passes first, then its volume.

    Attributes:
        sides: TransferBatch, transfer, group and price of each side.
        with_volume: whether the latency is over.
    """

    sides: list[tuple[TransferBatch, Transfer, Group, TransferPrice]]
    volume_s: float
    begin: float
    with_volume: bool = False

    def fire(self, now: float) -> None:
        """End the latency and begin the volume, or end the transfer."""
        # Latency is over, or the volume was: a flow fires once for each phase.
        if self.with_volume or not self.volume_s:
            self._finish(now)
            return
        self.with_volume, self.left, self.since = True, self.volume_s, now
        # Links are occupied by the volume only, so a small message slows no neighbour.
        for batch, _, _, price in self.sides:
            device = batch.stream.device
            device.use(price.links, +1)
            device.flows.append(self)
        self._retime_neighbours(now)

    def _finish(self, now: float) -> None:
        """End the transfer on all sides."""
        for batch, transfer, _, price in self.sides:
            device, lane = batch.stream.device, batch.stream
            if lane.num_steps == device.num_steps - 1:
                device.transfers.append(Interval(lane.name, self.begin, now, transfer))
            if self.with_volume:
                device.use(price.links, -1)
                device.flows.remove(self)
            device.count_flows(-1, now)
        if self.with_volume:
            self._retime_neighbours(now)
        for batch, transfer, _, _ in self.sides:
            clock = batch.stream.device.clock
            batch.left -= 1
            if not batch.left:
                stream = batch.stream
                # The time from this side's arrival until all had arrived was spent on its peers.
                if self.begin > batch.since:
                    stream.segments.append((batch.since, self.begin, "peers"))
                stream.segments.append((max(batch.since, self.begin), now, transfer))
                stream.busy, stream.running = False, None
                clock.ready.append(stream)
            batch.work.count_down(clock)

    # Every flow that begins or ends changes the number of sharers for all others on its ranks.
    def _retime_neighbours(self, now: float) -> None:
        """Set the rates of all flows that share a rank with this flow, including its own if it still runs."""
        devices = [batch.stream.device for batch, *_ in self.sides]
        for flow in {id(flow): flow for device in devices for flow in device.flows}.values():
            flow.retime(now)

    def retime(self, now: float) -> None:
        """Set the rate: as slow as on the busiest of its links, on any side, and slower beside kernels."""
        share, sharers = 1.0, 1
        for batch, transfer, _, price in self.sides:
            device = batch.stream.device
            sharers = max(sharers, max((device.links[link] for link in price.links), default=1))
            # NCCL's kernels share SMs and memory with the others; a read of a peer's memory needs
            # no SM.
            if device.computes and transfer.kind != "read":
                share = device.speed_beside_compute
        self.sides[0][0].stream.device.clock.settle(self, now, share / sharers)


_Key = tuple[Any, ...]
"""Key that the sides of a transfer share."""


class Rendezvous:
    """Transfers that some sides have reached, and that wait for the others.

    Attributes:
        ranks: ranks that have a trace.
    """

    def __init__(self, clock: Clock, cost: Cost, ranks: Collection[int]) -> None:
        self.clock, self.cost, self.ranks = clock, cost, ranks
        # Sides of a transfer that wait for the others, by the key that all sides have in common.
        self._waiting: dict[_Key, list[Any]] = defaultdict(list)
        # Numbers of each rank's transfers of a kind in a group.
        self._turns: dict[_Key, Iterator[int]] = defaultdict(count)
        self._prices: dict[_Key, TransferPrice] = {}

    def arrive(self, batch: TransferBatch, now: float) -> None:
        """Note that a stream has reached its transfers.

        Begin each transfer that all traced ranks have reached.
        """
        batch.since = now
        rank = batch.stream.device.rank
        for transfer, group in batch.sides:
            side = (batch, transfer, group, self._price(transfer, group, rank))
            key, expected = self._key(transfer, group, rank)
            # No other side is traced: the untraced peers arrive at the same time.
            if expected == 1:
                self._begin([side], now)
                continue
            others = self._waiting[key]
            others.append(side)
            if len(others) == expected:
                self._begin(self._waiting.pop(key), now)

    def _price(self, transfer: Transfer, group: Group, rank: int) -> TransferPrice:
        """Return the price of a transfer for one side. Equal transfers are priced once."""
        key = (id(group), transfer.kind, transfer.size_bytes, transfer.peer, rank)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self.cost.transfer(transfer, group, rank=rank)
        return price

    def _key(self, transfer: Transfer, group: Group, rank: int) -> tuple[_Key, int]:
        """Return the key that all traced sides of a transfer have in common, and the number of these sides."""
        # Both sides of a send and receive come here: they need one key, whichever comes first.
        # Names of groups differ between ranks, axes and ranks do not. The n-th calls of all sides
        # match.
        expected = sum(peer in self.ranks for peer in group.ranks)
        kind, same = transfer.kind, (group.axes, group.ranks)
        if kind in ("send", "recv"):
            if transfer.peer not in self.ranks:
                raise ReplayError(
                    f"rank {rank}: {describe(transfer, group)}, of which there is no trace; replay the ranks of all "
                    "pipeline stages together"
                )
            pair = (rank, transfer.peer) if kind == "send" else (transfer.peer, rank)
            same, expected = (*same, *pair), 2
        if expected == 1:
            return (), 1
        # Each rank counts its own calls, so the n-th call of one matches the n-th of the others.
        turn = next(self._turns[(rank, kind, *same)])
        return (*same, "p2p" if len(same) == 4 else kind, turn), expected

    def _begin(self, sides: list[Any], now: float) -> None:
        """Begin a transfer that all sides have reached."""
        # Both sides price the transfer from their own place; the slower of them holds up both.
        latency_s = max(price.latency_s for *_, price in sides)
        volume_s = max(price.volume_s for *_, price in sides)
        flow = Flow(left=latency_s, since=now, sides=sides, volume_s=volume_s, begin=now)
        for batch, *_ in sides:
            batch.stream.device.count_flows(+1, now)
        self.clock.push(now + flow.left, flow)


def describe(transfer: Transfer, group: Group) -> str:
    """Return a transfer as text for a message: its kind, peer, group and place in the program."""
    where = transfer.scope.action or transfer.scope.module or transfer.scope.phase
    ways = {
        "send": f"a send to rank {transfer.peer}",
        "recv": f"a receive from rank {transfer.peer}",
    }
    return f"{ways.get(transfer.kind, transfer.kind)} in group {axis_of(group)} ({where})"
