"""Clock of the replay: a heap of timed processes, and a list of processes that may go on now.

Imports no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from .timeline import Lane


class ReplayError(Exception):
    """Failure of a replay: the step cannot end, because ranks wait for each other forever or for a rank without a trace."""


class Process(Protocol):
    """A stream or a host, which runs until it has to wait, or a kernel or transfer in progress."""

    def fire(self, now: float) -> None:
        """Go on as far as possible at this time."""


class Timed(Process, Protocol):
    """A process whose next event has a time.

    Attributes:
        version: grows whenever the time changes, so that older entries of the heap are ignored.
    """

    version: int


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """A kernel or a transfer in progress.

    Attributes:
        left: seconds of work that were left at the time `since`, at full rate.
        since: time of the last change of the rate.
        rate: share of the full rate at which the work runs since then.
    """

    left: float
    since: float
    rate: float = 1.0
    version: int = 0

    def fire(self, now: float) -> None:
        """End the work, or its first part."""
        raise NotImplementedError

    def retime(self, now: float) -> None:
        """Set its rate anew."""
        raise NotImplementedError


class Clock:
    """Simulated time of all ranks.

    Attributes:
        heap: entries (time, serial number, version, process).
        ready: processes that may go on at the current time.
        now: the current time, in seconds.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int, Timed]] = []
        self.ready = deque[Process]()
        self.numbers = count()
        self.now = 0.0

    def is_quiet(self, until: float) -> bool:
        """Return whether nothing happens up to a time, so that the one process that runs may set the clock itself."""
        return not self.ready and (not self.heap or self.heap[0][0] > until)

    def push(self, time: float, process: Timed) -> None:
        """Schedule a process for a time."""
        # The number breaks ties in the order of arrival, and keeps heapq from comparing objects.
        heappush(self.heap, (time, next(self.numbers), process.version, process))

    def settle(self, work: Work, now: float, rate: float) -> None:
        """Subtract the work done at the old rate, and schedule the end at the new rate."""
        left = work.left - (now - work.since) * work.rate
        work.left, work.since, work.rate = left, now, rate
        # The heap holds an older entry for it, whose version no longer matches.
        work.version += 1
        end = now + left / rate if left > 0.0 else now
        heappush(self.heap, (end, next(self.numbers), work.version, work))

    def run(self) -> None:
        """Run all processes until nothing can happen any more."""
        heap, ready = self.heap, self.ready
        while True:
            # First let all processes go on that can at this time, then move the clock.
            while ready:
                ready.popleft().fire(self.now)
            if not heap:
                return
            self.now, _, version, process = heappop(heap)
            # Another version: the process was retimed or woken since.
            if process.version == version:
                process.fire(self.now)


@dataclass(slots=True, eq=False)
class Signal:
    """Condition that streams and hosts wait for: an event, or the transfers of a work.

    Attributes:
        lane: StreamQueue that a waiting lane names as its cause.
        pending: number of things that have yet to happen. At 0 the signal is reached.
        waiters: processes to wake then.
    """

    lane: Lane
    pending: int = 1
    waiters: list[Process] = field(default_factory=list)

    def count_down(self, clock: Clock) -> None:
        """Note that one of the pending things has happened, and wake the waiters after the last."""
        self.pending -= 1
        # Nothing fires here and now: the streams and hosts go on in the main loop, which keeps the
        # stack flat.
        if not self.pending:
            clock.ready.extend(self.waiters)
            self.waiters.clear()
