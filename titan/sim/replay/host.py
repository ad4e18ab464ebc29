"""Host of one rank in the replay: it issues the trace's operations to the queues of its device.

A host runs ahead of the device. It stops only where the trace stops it, or when a stream's queue is
full. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from titan.sim.price.cost import Cost
from titan.sim.price.profiles import Profile
from titan.sim.record.segments import any_layer
from titan.sim.record.trace import (
    HOST,
    Allocate,
    AwaitEvent,
    AwaitStream,
    AwaitWork,
    Free,
    Group,
    Launch,
    RecordEvent,
    Scope,
    Synchronize,
    Trace,
    Transfer,
)

from .clock import Signal
from .rendezvous import describe
from .streams import (
    AWAIT,
    BATCH,
    REACH,
    RUN,
    STEP,
    Device,
    StreamQueue,
    TransferBatch,
)
from .timeline import Lane

_LEAD, _LEAD_UNIT = 1024, 64
"""Launches that a stream's queue takes before the host must wait (the driver's limit, from memory), and how finely they count."""


class Host:
    """Host of a rank, with its place in the program and its own clock.

    Attributes:
        lane: work and waits of the host.
        program: the trace's step as calls with prices, looked up once and run through for each
            step.
        position: place in the program.
        clock_s: the host's time, which is ahead of the device's.
        waits_for: signal that the host waits for, if any.
    """

    def __init__(self, trace: Trace, device: Device, cost: Cost) -> None:
        self.trace, self.device, self.cost = trace, device, cost
        self.program = list(_program(trace, cost))
        self.position, self.clock_s = 0, 0.0
        self.waits_for: Signal | None = None
        self.lane = Lane("host", [(0.0, 0)])
        self.events: dict[int, Signal] = {}
        self.works: dict[int, Signal] = {}

    def fire(self, now: float) -> None:
        """Issue work until the trace stops the host, or ends."""
        # A host that waited goes on when the device says. One that did not is ahead of it already.
        if self.waits_for is not None and now > self.clock_s:
            self._spend(now, self.waits_for.lane)
        self.waits_for = None
        device = self.device
        while device.step < device.num_steps:
            while self.position < len(self.program):
                operation, *arguments = self.program[self.position]
                self.position += 1
                signal = operation(self, *arguments)
                if signal is not None and signal.pending:
                    self.waits_for = signal
                    signal.waiters.append(self)
                    return self._wake_idle()
            device.step, self.position = device.step + 1, 0
            self.lane.cuts.append((self.clock_s, len(self.lane.segments)))
            # Every stream gets the entry, also an idle stream: `Device.end_of` takes the slowest.
            for stream in device.streams.values():
                stream.queue.append((STEP,))
                stream.last = None
            # The trace is replayed with the same numbers of works in each step.
            self.works = {}
        self._wake_idle()

    def _wake_idle(self) -> None:
        """Wake streams that were idle for lack of work. Streams that wait for another stream are woken by it."""
        self.device.clock.ready.extend(
            s
            for s in self.device.streams.values()
            if s.queue and not s.busy and not isinstance(s.cause, StreamQueue)
        )

    def _spend(self, until: float, what: Launch | Transfer | Lane) -> None:
        """Move the host's clock, while it issues or computes something, or waits for a stream."""
        self.lane.segments.append((self.clock_s, until, what))
        self.clock_s = until

    # ---- operations of the program. They return a signal that the host has to wait for, if any.

    def compute(self, seconds: float, event: Launch) -> None:
        """Compute on the host. The device does not notice, unless it runs out of work."""
        self._spend(self.clock_s + seconds, event)

    def launch(
        self, seconds: float, host_s: float, event: Launch, copies: bool
    ) -> Signal | None:
        """Queue a kernel."""
        self._spend(self.clock_s + host_s, event)
        stream = self.device.stream(event.stream)
        stream.queue.append((RUN, self.clock_s, seconds, event, copies))
        stream.launched += 1
        # Every 64th launch leaves a signal in the queue. The host waits for the signal of 1,024
        # launches ago.
        if stream.launched % _LEAD_UNIT:
            return None
        stream.lead.append(self._reach(stream))
        return stream.lead.popleft() if len(stream.lead) * _LEAD_UNIT > _LEAD else None

    def transfer(self, event: Transfer, group: Group, host_s: float) -> None:
        """Queue a transfer."""
        self._spend(self.clock_s + host_s, event)
        key = event.group if event.detached else event.stream
        stream = self.device.stream(key)
        # Add to the batch that was issued last, if this transfer belongs to the same work.
        batch = stream.last
        if batch is None or batch.work_id != event.work or event.work < 0:
            if event.detached:
                self.await_stream(key, event.stream)
            # The group's stream must not begin before work issued on the current stream, as NCCL's
            # internal event ensures.
            work = self.works.get(event.work)
            if work is None:
                work = self.works[event.work] = Signal(stream, pending=0)
            batch = stream.last = TransferBatch(stream, event.work, work)
            stream.queue.append((BATCH, batch))
        batch.sides.append((event, group))
        batch.left += 1
        # A batch begins when its last transfer is issued: ncclGroupEnd launches all of them.
        batch.issued = self.clock_s
        batch.work.pending += 1

    def await_work(self, stream: int, work: int, host: bool) -> Signal | None:
        """Let a stream wait for the transfers of a work, and the host as well if `host` is set."""
        signal = self.works.get(work)
        if signal is None:
            # A work from before the trace is done.
            return None
        # The stream waits in its queue's order. The host goes on, unless it waits too.
        self.device.stream(stream).queue.append((AWAIT, signal))
        return signal if host else None

    def record(self, stream: int, event: int) -> None:
        """Record an event on a stream."""
        self.events[event] = self._reach(self.device.stream(stream))

    def _reach(self, stream: StreamQueue) -> Signal:
        """Queue a signal that is reached when the stream has done all work before it."""
        signal = Signal(stream)
        stream.queue.append((REACH, signal))
        return signal

    def await_event(self, stream: int, event: int) -> Signal | None:
        """Let a stream wait for an event, or the host if the stream is -1."""
        signal = self.events.get(event)
        if signal is None:  # an event that was never recorded is done, as in CUDA
            return None
        if stream < 0:
            return signal
        self.device.stream(stream).queue.append((AWAIT, signal))
        return None

    def await_stream(self, stream: int | str, other: int) -> None:
        """Let a stream wait for all work that another stream has been given so far."""
        if stream != other:
            self.device.stream(stream).queue.append(
                (AWAIT, self._reach(self.device.stream(other)))
            )

    def synchronize(self, stream: int) -> Signal:
        """Let the host wait for a stream, or for all streams with -1."""
        # A signal for all streams: it is done when each of them has come to it.
        device = self.device
        streams = list(device.streams.values()) if stream < 0 else [device.stream(stream)]
        signal = Signal(streams[0], pending=len(streams))
        for each in streams:
            each.queue.append((REACH, signal))
        return signal

    def describe_wait(self) -> str:
        """Return the transfers that keep this rank from going on, for a message."""
        batches = [stream.running for stream in self.device.streams.values() if stream.running]
        sides = [side for batch in batches for side in batch.sides]
        return " and ".join(describe(*side) for side in sides) or "an event that nobody records"


USUAL_PACE = {"forward": 45.0, "backward": 45.0, "clip": 5.0, "optimizer": 12.0}
"""Tiny operations for each event, by phase, where a trace has no recorded pace: those of Llama's blocks under FSDP, rounded."""
_PHASES = {"setup": "forward", "recompute": "backward"}
_FSDP_AXES = {"dp_shard", "dp_replicate"}
_WORK = ("matmul", "attention")


class Issue:
    """Seconds for which a host is busy until it has issued an event: Python, autograd, DTensor and hooks, and the launch itself.

    The time of a block's call (titan.sim.record.host_meter) is spread over the events of blocks in
    that phase. In compiled blocks, only FSDP's hooks take time of their own, since they run outside
    of the compiled code.
    """

    def __init__(self, trace: Trace, cost: Cost) -> None:
        self.trace, self.cost = trace, cost
        self._region: tuple[str, str] | None = None  # compiled code that runs now
        self._paces: dict[int, float] = {}
        self._block_paces = _block_paces(trace)

    def kernel_s(self, event: Launch) -> float:
        """Return the seconds for a kernel."""
        kernel = event.kernel
        seconds = self.cost.launch_s(kernel)
        if kernel.host == "compiled":
            region = _region(event.scope)
            if region != self._region:
                seconds += self.cost.compiled_call_s
            self._region = region
            return seconds
        self._region = None
        shapes, is_list = kernel.shapes, kernel.kind == "optimizer"
        count = shapes[1][0] if is_list and len(shapes) == 2 else 1
        return seconds + count * self._pace_s(event.scope)

    def transfer_s(self, event: Transfer) -> float:
        """Return the seconds for a transfer. Compiled code starts its own as it launches kernels."""
        seconds = self.cost.launch_transfer_s
        if self._region == _region(event.scope) and not _is_hook(self.trace, event):
            return seconds
        self._region = None
        return seconds + self._pace_s(event.scope)

    def _pace_s(self, scope: Scope) -> float:
        """Return the seconds from an event to the next one of a part."""
        pace = self._paces.get(id(scope))
        if pace is None:
            phase = _PHASES.get(scope.phase, scope.phase)
            tiny = self.trace.host.get(phase, USUAL_PACE[phase])
            if _in_block(scope):
                tiny = self._block_paces.get(phase, USUAL_PACE[phase])
            pace = self._paces[id(scope)] = tiny * self.cost.tiny_s
        return pace


@lru_cache(maxsize=16)  # a trace is replayed on several kinds of hardware
def _block_paces(trace: Trace) -> dict[str, float]:
    """Return the tiny operations for each event of a block, by phase."""
    events, hooks = Counter[str](), Counter[str]()
    calls: set[tuple[str, str]] = set()
    compiled = False
    for event in trace.step:
        if not (isinstance(event, Launch | Transfer) and _in_block(event.scope)):
            continue
        if event.scope.phase == "optimizer":
            continue
        phase, block = _region(event.scope)
        events[phase] += 1
        if isinstance(event, Launch):
            is_compiled = event.kernel.host == "compiled"
            compiled |= is_compiled
            hooks[phase] += not is_compiled
            if phase == "forward" and event.kernel.kind in _WORK:
                calls.add((event.scope.action, block))
        else:
            hooks[phase] += _is_hook(trace, event)
    count = len(calls) * trace.host.get("accumulation", 1)
    inner, numbers = ("hooks", hooks) if compiled else ("block", events)
    return {
        phase: trace.host[f"{phase} {inner}"] * count / number
        for phase, number in numbers.items()
        if number and f"{phase} {inner}" in trace.host
    }


def _is_hook(trace: Trace, event: Transfer) -> bool:
    """Return whether FSDP issues a transfer."""
    return not _FSDP_AXES.isdisjoint(trace.groups[event.group].axes)


def host_facts(traces: Collection[Trace], profile: Profile) -> dict[str, Any]:
    """Return the pace of traces and where it comes from, and whether any kernel is compiled."""
    pace = next(iter(traces)).host
    launches = (e for trace in traces for e in trace.step if isinstance(e, Launch))
    return {
        "pace": "counted" if all(trace.host for trace in traces) else "usual",
        "by_part": pace or USUAL_PACE,
        "tiny_us": profile.host_tiny_us,
        "source": profile.sources["host_tiny_us"],
        "compiled": any(launch.kernel.host == "compiled" for launch in launches),
    }


def _in_block(scope: Scope) -> bool:
    """Return whether a scope lies in a block."""
    return any_layer(scope.module) != scope.module


def _region(scope: Scope) -> tuple[str, str]:
    """Return a name of the compiled code that a scope lies in: each block is compiled separately."""
    return _PHASES.get(scope.phase, scope.phase), ".".join(scope.module.split(".")[:2])


def _program(trace: Trace, cost: Cost) -> Iterator[tuple[Any, ...]]:
    """Yield a step as calls of methods of `Host`, with prices. Allocations take no time."""
    # Ranks wait for the slowest of them, so that all kernels count as the slowest rank's.
    slowest = cost.profile.straggler(trace.world_size)
    prices: dict[int, float] = {}
    issue = Issue(trace, cost)
    for event in trace.step:
        kind = type(event)
        if kind is Allocate or kind is Free:
            continue
        if isinstance(event, Launch):
            kernel = event.kernel
            if event.stream == HOST:
                yield Host.compute, cost.host_s(kernel), event
                continue
            # By identity: equal kernels are one object within a trace (trace.Kernel).
            copies, seconds = kernel.kind == "host_copy", prices.get(id(kernel))
            if seconds is None:
                seconds = cost.kernel_s(kernel) * (1 if copies else slowest)
                prices[id(kernel)] = seconds
            yield Host.launch, seconds, issue.kernel_s(event), event, copies
        elif isinstance(event, Transfer):
            yield Host.transfer, event, trace.groups[event.group], issue.transfer_s(event)
        elif isinstance(event, AwaitWork):
            yield Host.await_work, event.stream, event.work, event.host
        elif isinstance(event, RecordEvent):
            yield Host.record, event.stream, event.event
        elif isinstance(event, AwaitEvent):
            yield Host.await_event, event.stream, event.event
        elif isinstance(event, AwaitStream):
            yield Host.await_stream, event.stream, event.other
        else:
            assert isinstance(event, Synchronize), f"no event: {event}"
            yield Host.synchronize, event.stream
