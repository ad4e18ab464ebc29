"""Device of one rank in the replay: streams as queues, and kernels that share the device.

`StreamQueue` works off its queue in order. `Device` sets the rate of the kernels that run at the
same time: they share the device equally, and lose the SMs and the bandwidth that a transfer holds.
Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan.sim.price.network import LINKS
from titan.sim.record.trace import COMPUTE_STREAM, Group, Launch, Transfer

from .clock import Clock, Signal, Work
from .timeline import Cause, Interval, Lane, axis_of

# A stream's queue holds tuples (kind, ...), because they are the cheapest objects of Python: a step
# has millions. RUN a kernel, BATCH transfers, REACH count a signal down, AWAIT wait for a signal,
# STEP the step ends here.
RUN, BATCH, REACH, AWAIT, STEP = range(5)


@dataclass(slots=True, eq=False)
class TransferBatch:
    """Transfers that run together: consecutive transfers of one work.

    Attributes:
        sides: this rank's side of each transfer, with its group.
        issued: time at which the host issued the last of them.
        since: time at which the stream reached the batch.
        left: number of transfers that have not ended.
    """

    stream: StreamQueue
    work_id: int
    work: Signal
    sides: list[tuple[Transfer, Group]] = field(default_factory=list)
    issued: float = 0.0
    since: float = 0.0
    left: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class StreamQueue(Lane):
    """Queue of one rank.

    Attributes:
        cause: reason for the current wait, and `blocked_since` its beginning.
        last: TransferBatch that the host may still add to.
        running: TransferBatch that runs now.
        version: grows whenever the stream goes on, so that older entries of the clock are ignored.
        launched: number of kernels that the host has queued.
        lead: signals in the queue that limit how far ahead the host may be.
    """

    device: Device
    queue: deque[tuple[Any, ...]] = field(default_factory=deque)
    busy: bool = False
    cause: Cause | None = "host"
    blocked_since: float = 0.0
    version: int = 0
    last: TransferBatch | None = None
    running: TransferBatch | None = None
    launched: int = 0
    lead: deque[Signal] = field(default_factory=deque)

    def fire(self, now: float) -> None:
        """Work off the queue, until an entry runs or has to wait."""
        # Entered from the clock, from a signal, from a host: a stream that runs something is woken
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
        device, queue, clock = self.device, self.queue, self.device.clock
        while queue:
            item = queue[0]
            kind = item[0]
            if kind is RUN:
                _, issued, seconds, launch, copies = item
                pool = device.copies if copies else device.kernels
                # In order of the trace, this is the kernel's turn, but its time may not have come.
                if issued > now:  # the host issues it later
                    if device.flows or not clock.is_quiet(issued):
                        clock.push(issued, self)
                        return self._block(now, "host")
                    self.segments.append((now, issued, "host"))
                    clock.now = now = issued
                queue.popleft()
                device.note_computing(self, True, now)
                if not pool:
                    end = now + seconds / (1.0 if copies else device.speed)
                    # Nothing else happens until then, so that the clock need not be asked.
                    if clock.is_quiet(end):
                        self.segments.append((now, end, launch))
                        clock.now = now = end
                        continue
                self.busy = True
                pool.append(
                    KernelRun(
                        left=seconds, since=now, stream=self, event=launch, start=now, pool=pool
                    )
                )
                return device.retime(pool, now)
            if kind is AWAIT:
                signal = item[1]
                if signal.pending:
                    # Stay in front of the queue: the signal wakes the stream, which then looks
                    # again.
                    signal.waiters.append(self)
                    return self._block(now, signal.lane)
                queue.popleft()
            elif kind is REACH:
                queue.popleft()
                item[1].count_down(clock)
            elif kind is BATCH:
                batch = item[1]
                if batch.issued > now:
                    clock.push(batch.issued, self)
                    return self._block(now, "host")
                queue.popleft()
                self.busy, self.running = True, batch
                device.note_computing(self, False, now)
                return device.arrive(batch, now)
            else:
                # STEP: all that was queued before it has run, so the step ends for this stream.
                queue.popleft()
                self.cuts.append((now, len(self.segments)))
        # The queue is empty: the host has not issued more yet.
        self._block(now, "host")

    def _block(self, now: float, cause: Cause) -> None:
        """Begin to wait."""
        self.cause, self.blocked_since = cause, now
        self.device.note_computing(self, False, now)


@dataclass(slots=True, eq=False, kw_only=True)
class KernelRun(Work):
    """A kernel that runs.

    Attributes:
        start: time at which it began.
        pool: kernels, or copies, that share the device with it.
    """

    stream: StreamQueue
    event: Launch
    start: float
    pool: list[KernelRun]

    def fire(self, now: float) -> None:
        """End the kernel."""
        stream = self.stream
        # First leave the pool, so that the others share the device among fewer.
        self.pool.remove(self)
        if self.pool:
            stream.device.retime(self.pool, now)
        stream.segments.append((self.start, now, self.event))
        stream.busy = False
        stream.fire(now)


@dataclass(eq=False)
class Device:
    """Streams of a rank, and everything that runs on its SMs, copy engines and links.

    Attributes:
        rank: global rank.
        step: number of the step that the host issues.
        num_steps: number of steps to replay.
        arrive: called with a batch of transfers that a stream has reached.
        kernels: kernels that run now.
        copies: copies between host and device that run now. They share the bus, and take nothing
            from kernels.
        num_flows: number of transfers that run now, latency included.
        flows: transfers whose volume is under way now.
        computes: whether the compute stream has work, so that it takes from transfers what they
            take from it.
        links: number of flows on each link.
        transfers: transfers of the last step.
    """

    rank: int
    clock: Clock
    groups: Mapping[str, Group]
    num_steps: int
    speed_beside_transfer: float
    speed_beside_compute: float
    arrive: Callable[[TransferBatch, float], None]
    step: int = 0
    streams: dict[int | str, StreamQueue] = field(default_factory=dict)
    kernels: list[KernelRun] = field(default_factory=list)
    copies: list[KernelRun] = field(default_factory=list)
    num_flows: int = 0
    flows: list[Work] = field(default_factory=list)
    computes: bool = False
    transfers: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream(COMPUTE_STREAM)
        self.links = [0] * len(LINKS)

    def stream(self, key: int | str) -> StreamQueue:
        """Return the stream of a number, or of a group's name; make it on first use."""
        stream = self.streams.get(key)
        if stream is None:
            # Detached transfers run on a stream for their group, as NCCL has one for each
            # communicator.
            if isinstance(key, str):
                name = f"group {axis_of(self.groups[key])}"
            else:
                name = f"stream {key}" if key != COMPUTE_STREAM else "compute"
            # A stream that is made later has no part in the steps before.
            cuts = [(0.0, 0)] * (self.step + 1)
            stream = self.streams[key] = StreamQueue(name, cuts, device=self)
        return stream

    def end_of(self, step: int) -> float:
        """Return the time at which all streams had finished a step, counted from 0."""
        # cuts[0] is the beginning, so step n ends at n + 1.
        return max(stream.cuts[step + 1][0] for stream in self.streams.values())

    @property
    def is_done(self) -> bool:
        """Whether all steps were issued, and all streams are empty."""
        return self.step == self.num_steps and not any(
            s.busy or s.queue for s in self.streams.values()
        )

    @property
    def speed(self) -> float:
        """Share of their full rate at which kernels run, before they share the device."""
        return self.speed_beside_transfer if self.num_flows else 1.0

    def retime(self, pool: list[KernelRun], now: float) -> None:
        """Set the rate of all kernels or copies that run."""
        rate = (1.0 if pool is self.copies else self.speed) / len(pool)
        for run in pool:
            self.clock.settle(run, now, rate)

    def count_flows(self, change: int, now: float) -> None:
        """Note that a transfer has begun (+1) or ended (-1)."""
        # Only the first and the last transfer change the speed: several transfers hold the SMs of
        # one.
        before, self.num_flows = self.num_flows, self.num_flows + change
        if self.kernels and not (before and self.num_flows):
            self.retime(self.kernels, now)

    def note_computing(self, stream: StreamQueue, computes: bool, now: float) -> None:
        """Note that a stream goes on or waits. If it is the compute stream, transfers get another rate."""
        if stream is not self.streams[COMPUTE_STREAM] or computes == self.computes:
            return
        self.computes = computes
        for flow in self.flows:
            flow.retime(now)

    def use(self, links: tuple[int, ...], change: int) -> None:
        """Add a flow to these links (+1), or remove it (-1)."""
        for link in links:
            self.links[link] += change
