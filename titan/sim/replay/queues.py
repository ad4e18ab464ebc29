"""Replay traces on a clock: what each rank's streams do when, and why its compute stream is ever idle.

All traced ranks run in one discrete-event simulation. A host issues work as its trace says, ahead of the device, and stops
only where the trace stops it. Each stream is a queue. The kernel or transfer at the head of a queue runs at a rate that
depends on what runs beside it, and is retimed whenever that changes:

    kernels     of one rank share the device equally. While a transfer runs, they lose the SMs and bandwidth that it holds
    transfers   of one rank share links equally. Latency is not shared

A transfer between traced ranks (of other pipeline stages) begins when all of them have reached it. Peers that are not traced
do what the traced rank does, and arrive with it. Detached transfers of a group queue on the group's own stream, as NCCL's do.
Transfers that share a work run together.

The step is replayed twice, and the second replay counts: by then the host is ahead of the device, and pipeline stages meet
as they did in the step before. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any

from titan.sim.price.cost import Cost
from titan.sim.price.network import LINKS, TransferPrice
from titan.sim.record.trace import (
    COMPUTE_STREAM,
    HOST,
    Allocate,
    AwaitEvent,
    AwaitStream,
    AwaitWork,
    Free,
    Group,
    Launch,
    RecordEvent,
    Synchronize,
    Trace,
    Transfer,
    no_garbage_collection,
)
from titan.sim.replay.timeline import Cause, Interval, Lane, Timeline, axis_of, summarise, waiting


class ReplayError(Exception):
    """Report traces that cannot run together: ranks wait for each other forever, or for a rank that
    has no trace."""


def replay(
    traces: Mapping[int, Trace], cost: Cost, *, steps: int = 2, busiest: float = 1.0
) -> Timeline:
    """Replay consecutive steps of the traced ranks, by global rank; return the last one. Raises ReplayError.

    With one step, hosts and devices start together, and the step ends when the last stream is done.
    busiest: rows of the traced ranks' experts over the mean.
    """
    assert steps >= 1
    with no_garbage_collection():
        simulation = _Simulation(traces, cost, steps)
        simulation.run()
        return _timeline([*simulation.ranks.values()], steps, busiest)


def _timeline(ranks: list[_Rank], steps: int, busiest: float) -> Timeline:
    # The step lasts from the end of the one before to its own end, on the slowest rank each. Ranks
    # need not begin together.
    begin = max(rank.end_of(steps - 2) for rank in ranks) if steps > 1 else 0.0
    step_s = max(rank.end_of(steps - 1) for rank in ranks) - begin
    # Charts count from the earliest beginning of a compute stream.
    origin = min(rank.streams[COMPUTE_STREAM].cuts[-2][0] for rank in ranks)
    by_rank = {}
    for rank in ranks:
        lanes, groups = [*rank.streams.values()], rank.trace.groups
        by_rank[rank.number] = summarise(
            rank.number, lanes, rank.transfers, rank.host, groups, step_s=step_s, origin=origin
        )
        slowest = 1 + rank.simulation.cost.profile.lag(rank.trace.world_size)
        by_rank[rank.number].waiting_s = waiting(by_rank[rank.number], groups, slowest, busiest)
    return Timeline(step_s, by_rank)


# ---------------------------------------------------------------------------------------------------------- state


class _Point:
    """Something that streams and hosts wait for: an event, or the transfers of a work. Done when nothing is pending."""

    __slots__ = ("pending", "stream", "waiters")

    def __init__(self, stream: _Stream, pending: int = 1) -> None:
        self.stream = stream
        self.pending = pending
        self.waiters: list[_Stream | _Rank] = []

    def count_down(self, simulation: _Simulation) -> None:
        self.pending -= 1
        # Nothing fires here and now: the streams and hosts go on in the main loop, which keeps the
        # stack flat.
        if not self.pending:
            simulation.ready.extend(self.waiters)
            self.waiters.clear()


class _Batch:
    """Transfers that run together: those of one work that were issued in a row. left: how many have not ended."""

    __slots__ = ("issued", "left", "sides", "since", "stream", "work", "work_id")

    def __init__(self, stream: _Stream, work_id: int, work: _Point) -> None:
        self.stream, self.work_id, self.work = stream, work_id, work
        self.sides: list[tuple[Transfer, Group]] = []
        self.issued = self.since = 0.0
        self.left = 0


_LEAD, _LEAD_UNIT = 1024, 64
"""Launches that a stream's queue takes before the host must wait (the driver's limit, from memory), and how finely they count."""

# A stream's queue holds tuples (kind, ...), because they are the cheapest objects of Python: a step has millions.
# _RUN a kernel, _BATCH transfers, _REACH count a point down, _AWAIT wait for a point, _STEP the step ends here.
_RUN, _BATCH, _REACH, _AWAIT, _STEP = range(5)


class _Stream(Lane):
    """A queue of one rank.

    cause, blocked_since: what it waits for, and since when. last: the batch that the host may still add to. version: grows
    whenever the stream goes on, so that older entries of the clock are ignored. lead: points in the queue that limit how far
    ahead the host may be.
    """

    __slots__ = (
        "blocked_since", "busy", "cause", "last", "launched", "lead", "queue", "rank", "running", "version",
    )  # fmt: skip

    def __init__(self, rank: _Rank, name: str) -> None:
        super().__init__(name, steps_before=rank.step)
        self.rank = rank
        self.queue: deque[tuple[Any, ...]] = deque()
        self.busy = False
        self.cause: Cause | None = "host"
        self.blocked_since = 0.0
        self.version = 0
        self.last: _Batch | None = None
        self.running: _Batch | None = None
        self.launched = 0
        self.lead: deque[_Point] = deque()

    def fire(self, now: float) -> None:
        self.advance(now)

    def advance(self, now: float) -> None:
        """Work off the queue, until something runs or must be waited for."""
        # Entered from the clock, from a point, from a host: a stream that runs something is woken
        # when that ends.
        if self.busy:
            return
        if self.cause is not None:
            # A wait of no length leaves no segment.
            if now > self.blocked_since:
                self.segments.append((self.blocked_since, now, self.cause))
            self.cause = None
        # Entries of the clock for the old state are void from here on.
        self.version += 1
        queue, simulation = self.queue, self.rank.simulation
        while queue:
            item = queue[0]
            kind = item[0]
            if kind is _RUN:
                # In order of the trace, this is the kernel's turn, but its time may not have come.
                if item[1] > now:  # the host issues it later
                    simulation.push(item[1], self)
                    return self._block(now, "host")
                queue.popleft()
                self.busy = True
                return self.rank.start(_Task(self, item[2], item[3], now), copies=item[4], now=now)
            if kind is _AWAIT:
                point = item[1]
                if point.pending:
                    # Stay in front of the queue: the point wakes the stream, which then looks
                    # again.
                    point.waiters.append(self)
                    return self._block(now, point.stream)
                queue.popleft()
            elif kind is _REACH:
                queue.popleft()
                item[1].count_down(simulation)
            elif kind is _BATCH:
                batch = item[1]
                if batch.issued > now:
                    simulation.push(batch.issued, self)
                    return self._block(now, "host")
                queue.popleft()
                self.busy, self.running = True, batch
                return simulation.arrive(batch, now)
            else:
                # _STEP: all that was queued before it has run, so the step ends for this stream.
                queue.popleft()
                self.cuts.append((now, len(self.segments)))
        # The queue is empty: the host has not issued more yet.
        self._block(now, "host")

    def _block(self, now: float, cause: Cause) -> None:
        self.cause, self.blocked_since = cause, now


class _Task:
    """A kernel that runs. left: seconds of work at full rate. pool: the kernels, or the copies, that share the device with it."""

    __slots__ = ("event", "left", "pool", "rate", "since", "start", "stream", "version")

    def __init__(self, stream: _Stream, seconds: float, event: Launch, now: float) -> None:
        self.stream, self.event, self.left = stream, event, seconds
        self.start = self.since = now
        self.rate, self.version = 1.0, 0
        self.pool: list[_Task] = []

    def fire(self, now: float) -> None:
        stream = self.stream
        # First leave the pool, so that those who stay share the device among fewer.
        self.pool.remove(self)
        if self.pool:
            stream.rank.retime(self.pool, now)
        stream.segments.append((self.start, now, self.event))
        stream.busy = False
        stream.advance(now)


class _Flow:
    """A transfer that all sides have reached. First its latency passes, then its volume.

    sides: each with its batch, its transfer, its group and its price. with_volume: the latency is over.
    """

    __slots__ = ("begin", "left", "rate", "sides", "since", "version", "volume_s", "with_volume")

    def __init__(
        self, sides: list[tuple[_Batch, Transfer, Group, TransferPrice]], now: float
    ) -> None:
        self.sides = sides
        # Both sides price the transfer from their own place; the slower of them holds up both.
        self.left = max(price.latency_s for *_, price in sides)
        self.volume_s = max(price.volume_s for *_, price in sides)
        self.begin = self.since = now
        self.rate, self.version, self.with_volume = 1.0, 0, False

    def fire(self, now: float) -> None:
        """End the latency and begin the volume, or end the transfer."""
        # Latency is over, or the volume was: a flow fires once for each phase.
        if self.with_volume or not self.volume_s:
            self._finish(now)
            return
        self.with_volume, self.left, self.since = True, self.volume_s, now
        # Links are occupied by the volume only, so a small message slows no neighbour.
        for batch, _, _, price in self.sides:
            batch.stream.rank.use(price.links, +1)
            batch.stream.rank.flows.append(self)
        self._retime_neighbours(now)

    def _finish(self, now: float) -> None:
        for batch, transfer, _, price in self.sides:
            rank = batch.stream.rank
            lane = batch.stream
            if lane.num_steps == rank.steps - 1:
                rank.transfers.append(Interval(lane.name, self.begin, now, transfer))
            if self.with_volume:
                rank.use(price.links, -1)
                rank.flows.remove(self)
            rank.count_flows(-1, now)
        if self.with_volume:
            self._retime_neighbours(now)
        for batch, transfer, _, _ in self.sides:
            batch.left -= 1
            if not batch.left:
                stream = batch.stream
                # The time from this side's arrival until all had arrived was spent on its peers.
                if self.begin > batch.since:
                    stream.segments.append((batch.since, self.begin, "peers"))
                stream.segments.append((max(batch.since, self.begin), now, transfer))
                stream.busy, stream.running = False, None
                stream.rank.simulation.ready.append(stream)
            batch.work.count_down(batch.stream.rank.simulation)

    # Every flow that begins or ends changes the number of sharers for all others on its ranks.
    def _retime_neighbours(self, now: float) -> None:
        """Set the rates of all flows that share a rank with this one, itself included if it still runs."""
        ranks = [batch.stream.rank for batch, *_ in self.sides]
        for flow in {id(flow): flow for rank in ranks for flow in rank.flows}.values():
            # A flow is as slow as on the busiest of its links, on any side.
            uses = ((batch.stream.rank.links, p.links) for batch, _, _, p in flow.sides)
            sharers = max((taken[link] for taken, links in uses for link in links), default=1)
            ranks[0].simulation.settle(flow, now, 1 / sharers)


class _Rank:
    """A rank: its host, its streams, and what runs on its device and links. num_flows: transfers that run, latency included."""

    def __init__(self, simulation: _Simulation, trace: Trace, steps: int) -> None:
        self.simulation, self.trace, self.number = simulation, trace, trace.rank
        self.step, self.steps = 0, steps
        # The trace as calls with prices: looked up once, and run through for each step.
        self.program = list(_program(trace, simulation.cost))
        # The host's place in the program, and its own clock, which runs ahead of the device's.
        self.position, self.clock = 0, 0.0
        self.waits_for: _Point | None = None
        self.host = Lane("host", steps_before=0)
        self.streams: dict[int | str, _Stream] = {}
        self.stream(COMPUTE_STREAM)
        self.events: dict[int, _Point] = {}
        self.works: dict[int, _Point] = {}
        self.kernels: list[_Task] = []
        # Host copies run on copy engines: they share the bus with each other, and take nothing from
        # kernels.
        self.copies: list[_Task] = []
        self.num_flows = 0
        self.flows: list[_Flow] = []
        self.links = [0] * len(LINKS)
        self.transfers: list[Interval] = []  # of the last step

    def stream(self, key: int | str) -> _Stream:
        """Return the stream with a number, or that of a group by the group's name; make it when it is first used."""
        stream = self.streams.get(key)
        if stream is None:
            # Detached transfers run on a stream for their group, as NCCL has one for each
            # communicator.
            if isinstance(key, str):
                name = f"group {axis_of(self.trace.groups[key])}"
            else:
                name = f"stream {key}" if key != COMPUTE_STREAM else "compute"
            stream = self.streams[key] = _Stream(self, name)
        return stream

    def end_of(self, step: int) -> float:
        """Return the time when all streams had finished a step, counted from 0."""
        # cuts[0] is the beginning, so step n ends at n + 1.
        return max(stream.cuts[step + 1][0] for stream in self.streams.values())

    # -- the host

    def advance(self, now: float) -> None:
        """Issue work until the trace stops the host, or ends."""
        # A host that waited goes on when the device says. One that did not is ahead of it already.
        if self.waits_for is not None and now > self.clock:
            self._spend(now, self.waits_for.stream)
        self.waits_for = None
        while self.step < self.steps:
            while self.position < len(self.program):
                operation, *arguments = self.program[self.position]
                self.position += 1
                point = operation(self, *arguments)
                if point is not None and point.pending:
                    self.waits_for = point
                    point.waiters.append(self)
                    return self._wake_idle()
            self.step, self.position = self.step + 1, 0
            self.host.cuts.append((self.clock, len(self.host.segments)))
            # Every stream gets the mark, also one that was idle: `end_of` takes the slowest.
            for stream in self.streams.values():
                stream.queue.append((_STEP,))
                stream.last = None
            # The trace is replayed with the same numbers of works in each step.
            self.works = {}
        self._wake_idle()

    def _wake_idle(self) -> None:
        """Let streams go on that were idle for lack of work. Those that wait for another stream are woken by it."""
        self.simulation.ready.extend(
            s
            for s in self.streams.values()
            if s.queue and not s.busy and not isinstance(s.cause, _Stream)
        )

    def _spend(self, until: float, what: Launch | Transfer | Lane) -> None:
        """Move the host's clock, while it issues or computes this, or waits for a stream."""
        self.host.segments.append((self.clock, until, what))
        self.clock = until

    # The host computes: the device does not notice, unless it runs out of work.
    def compute(self, seconds: float, event: Launch) -> None:
        self._spend(self.clock + seconds, event)

    def launch(self, seconds: float, host_s: float, event: Launch, copies: bool) -> _Point | None:
        self._spend(self.clock + host_s, event)
        stream = self.stream(event.stream)
        stream.queue.append((_RUN, self.clock, seconds, event, copies))
        stream.launched += 1
        # Every 64th launch leaves a point in the queue. The host waits for the point of 1,024 launches ago.
        if stream.launched % _LEAD_UNIT:
            return None
        stream.lead.append(self._reach(stream))
        return stream.lead.popleft() if len(stream.lead) * _LEAD_UNIT > _LEAD else None

    def transfer(self, event: Transfer, group: Group, host_s: float) -> None:
        self._spend(self.clock + host_s, event)
        key = event.group if event.detached else event.stream
        stream = self.stream(key)
        # Add to the batch that was issued last, if this transfer belongs to the same work.
        batch = stream.last
        if batch is None or batch.work_id != event.work or event.work < 0:
            if event.detached:
                self.await_stream(key, event.stream)
            # The group's stream must not begin before what was issued on the current one, as NCCL's
            # internal event ensures.
            work = self.works.get(event.work)
            if work is None:
                work = self.works[event.work] = _Point(stream, pending=0)
            batch = stream.last = _Batch(stream, event.work, work)
            stream.queue.append((_BATCH, batch))
        batch.sides.append((event, group))
        batch.left += 1
        # A batch begins when its last transfer is issued: ncclGroupEnd launches all of them.
        batch.issued = self.clock
        batch.work.pending += 1

    def await_work(self, stream: int, work: int, host: bool) -> _Point | None:
        point = self.works.get(work)
        if point is None:
            # A work from before the trace is done.
            return None
        # The stream waits in its queue's order. The host goes on, unless it waits too.
        self.stream(stream).queue.append((_AWAIT, point))
        return point if host else None

    def record(self, stream: int, event: int) -> None:
        self.events[event] = self._reach(self.stream(stream))

    def _reach(self, stream: _Stream) -> _Point:
        point = _Point(stream)
        stream.queue.append((_REACH, point))
        return point

    def await_event(self, stream: int, event: int) -> _Point | None:
        point = self.events.get(event)
        if point is None:  # an event that was never recorded is done, as in CUDA
            return None
        if stream < 0:
            return point
        self.stream(stream).queue.append((_AWAIT, point))
        return None

    def await_stream(self, stream: int | str, other: int) -> None:
        if stream != other:
            point = self._reach(self.stream(other))
            self.stream(stream).queue.append((_AWAIT, point))

    def synchronize(self, stream: int) -> _Point:
        # A point for all streams: it is done when each of them has come to it.
        streams = list(self.streams.values()) if stream < 0 else [self.stream(stream)]
        point = _Point(streams[0], pending=len(streams))
        for each in streams:
            each.queue.append((_REACH, point))
        return point

    # -- the device

    @property
    def speed(self) -> float:
        return self.simulation.beside_transfer if self.num_flows else 1.0

    def start(self, task: _Task, *, copies: bool, now: float) -> None:
        pool = task.pool = self.copies if copies else self.kernels
        pool.append(task)
        # Alone on the device: no neighbour needs a new rate.
        if len(pool) > 1:
            self.retime(pool, now)
        else:
            task.rate = 1.0 if copies else self.speed
            self.simulation.push(now + task.left / task.rate, task)

    def retime(self, pool: list[_Task], now: float) -> None:
        rate = (1.0 if pool is self.copies else self.speed) / len(pool)
        for task in pool:
            self.simulation.settle(task, now, rate)

    def count_flows(self, change: int, now: float) -> None:
        # Only the first and the last transfer change the speed: several of them hold as many SMs as
        # one.
        before, self.num_flows = self.num_flows, self.num_flows + change
        if self.kernels and not (before and self.num_flows):
            self.retime(self.kernels, now)

    def use(self, links: tuple[int, ...], change: int) -> None:
        for link in links:
            self.links[link] += change


def _program(trace: Trace, cost: Cost) -> Iterator[tuple[Any, ...]]:
    """Yield a step as calls of methods of `_Rank`, with prices. Allocations take no time."""
    # Ranks wait for the slowest of them, so that all kernels count as the slowest rank's.
    slowest = cost.profile.straggler(trace.world_size)
    prices: dict[int, tuple[float, float, bool]] = {}
    for event in trace.step:
        kind = type(event)
        if kind is Allocate or kind is Free:
            continue
        if isinstance(event, Launch):
            kernel = event.kernel
            if event.stream == HOST:
                yield _Rank.compute, cost.host_s(kernel), event
                continue
            # By identity: equal kernels are one object within a trace (trace.Kernel).
            price = prices.get(id(kernel))
            if price is None:
                copies = kernel.kind == "host_copy"
                seconds = cost.kernel_s(kernel) * (1 if copies else slowest)
                price = prices[id(kernel)] = (seconds, cost.launch_s(kernel), copies)
            yield _Rank.launch, price[0], price[1], event, price[2]
        elif isinstance(event, Transfer):
            yield _Rank.transfer, event, trace.groups[event.group], cost.launch_transfer_s
        elif isinstance(event, AwaitWork):
            yield _Rank.await_work, event.stream, event.work, event.host
        elif isinstance(event, RecordEvent):
            yield _Rank.record, event.stream, event.event
        elif isinstance(event, AwaitEvent):
            yield _Rank.await_event, event.stream, event.event
        elif isinstance(event, AwaitStream):
            yield _Rank.await_stream, event.stream, event.other
        else:
            assert isinstance(event, Synchronize), f"no event: {event}"
            yield _Rank.synchronize, event.stream


class _Simulation:
    """The clock, and where ranks meet. heap: (time, number, version, what fires); ready: what may go on now."""

    def __init__(self, traces: Mapping[int, Trace], cost: Cost, steps: int) -> None:
        self.cost = cost
        self.beside_transfer = cost.profile.compute_share_beside_transfer
        self.heap: list[tuple[float, int, int, _Task | _Flow | _Stream]] = []
        self.ready: deque[_Stream | _Rank] = deque()
        self.numbers = count()
        # Sides of a transfer that wait for the others, by the key under which they meet.
        self.meetings: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        # How many transfers of a kind each rank has begun in a group.
        self.calls: dict[tuple[Any, ...], int] = defaultdict(int)
        self.prices: dict[tuple[Any, ...], TransferPrice] = {}
        self.ranks = {number: _Rank(self, trace, steps) for number, trace in traces.items()}
        assert all(rank.number == number for number, rank in self.ranks.items())

    def push(self, time: float, what: _Task | _Flow | _Stream) -> None:
        # The number breaks ties in the order of arrival, and keeps heapq from comparing objects.
        heappush(self.heap, (time, next(self.numbers), what.version, what))

    def settle(self, what: _Task | _Flow, now: float, rate: float) -> None:
        """Subtract what was done at the old rate, and go on at the new one."""
        left = what.left - (now - what.since) * what.rate
        what.left, what.since, what.rate = left, now, rate
        # The clock holds an older entry for it, whose version no longer matches.
        what.version += 1
        end = now + left / rate if left > 0.0 else now
        heappush(self.heap, (end, next(self.numbers), what.version, what))

    def run(self) -> None:
        heap, ready, now = self.heap, self.ready, 0.0
        ready.extend(self.ranks.values())
        while True:
            # First let all go on that can at this time, then move the clock.
            while ready:
                ready.popleft().advance(now)
            if not heap:
                break
            now, _, version, what = heappop(heap)
            if what.version == version:  # else it was retimed or woken since
                what.fire(now)
        # The clock is empty, so nothing can happen any more. Whoever is not done waits for
        # something that never comes.
        stuck = [rank for rank in self.ranks.values() if rank.waits_for or _unfinished(rank)]
        if stuck:
            waits = "; ".join(f"rank {rank.number} waits for {_awaited(rank)}" for rank in stuck)
            raise ReplayError(f"the step cannot end: {waits}")

    def arrive(self, batch: _Batch, now: float) -> None:
        """Note that a stream has reached its transfers. Begin those that all traced ranks have
        reached."""
        batch.since = now
        rank = batch.stream.rank.number
        for transfer, group in batch.sides:
            side = (batch, transfer, group, self._price(transfer, group, rank))
            key, expected = self._meeting(transfer, group, rank)
            # No other side is traced: the untraced peers arrive at the same time.
            if expected == 1:
                self._begin([side], now)
                continue
            others = self.meetings[key]
            others.append(side)
            if len(others) == expected:
                self._begin(self.meetings.pop(key), now)

    def _price(self, transfer: Transfer, group: Group, rank: int) -> TransferPrice:
        key = (id(group), transfer.kind, transfer.size_bytes, transfer.peer, rank)
        price = self.prices.get(key)
        if price is None:
            price = self.prices[key] = self.cost.transfer(transfer, group, rank=rank)
        return price

    def _meeting(self, transfer: Transfer, group: Group, rank: int) -> tuple[tuple[Any, ...], int]:
        """Return the key under which the traced sides of a transfer meet, and how many sides there are."""
        # Both sides of a send and receive come here: they need one key, whichever comes first.
        # Names of groups differ between ranks, axes and ranks do not. The n-th calls of all sides meet.
        same = (group.axes, group.ranks)
        if transfer.kind in ("send", "recv"):
            if transfer.peer not in self.ranks:
                raise ReplayError(
                    f"rank {rank}: {_describe(transfer, group)}, of which there is no trace; replay the ranks of all "
                    "pipeline stages together"
                )
            pair = (rank, transfer.peer) if transfer.kind == "send" else (transfer.peer, rank)
            same, expected = (*same, *pair), 2
        else:
            expected = sum(peer in self.ranks for peer in group.ranks)
            if expected == 1:
                return (), 1
        # Each rank counts its own calls, so the n-th of one meets the n-th of the others.
        turn = self.calls[(rank, transfer.kind, *same)]
        self.calls[(rank, transfer.kind, *same)] += 1
        return (*same, "p2p" if len(same) == 4 else transfer.kind, turn), expected

    def _begin(self, sides: list[Any], now: float) -> None:
        flow = _Flow(sides, now)
        for batch, *_ in sides:
            batch.stream.rank.count_flows(+1, now)
        self.push(now + flow.left, flow)


def _unfinished(rank: _Rank) -> bool:
    return rank.step < rank.steps or any(s.busy or s.queue for s in rank.streams.values())


def _awaited(rank: _Rank) -> str:
    """Return what keeps a rank from going on, for people."""
    batches = [stream.running for stream in rank.streams.values() if stream.running]
    sides = [side for batch in batches for side in batch.sides]
    return " and ".join(_describe(*side) for side in sides) or "an event that nobody records"


def _describe(transfer: Transfer, group: Group) -> str:
    where = transfer.scope.action or transfer.scope.module or transfer.scope.phase
    ways = {
        "send": f"a send to rank {transfer.peer}",
        "recv": f"a receive from rank {transfer.peer}",
    }
    return f"{ways.get(transfer.kind, transfer.kind)} in group {axis_of(group)} ({where})"
