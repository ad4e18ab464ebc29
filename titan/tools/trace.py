"""Analysis of a trace of torch's profiler: the time of a step by kind of work, and the place of each instant.

    ranges      busy times of the hardware: kernels of a GPU's streams; on a CPU each operator, while it is the innermost
                event of its thread
    place       the module whose range (profiling_hook.py) encloses the operator, or for a kernel the operator that launched
                it; a backward node belongs to the forward operator of its sequence number
    sweep       each instant of the step goes to the work that began first; to copies only while no other work runs; to communication
                only while neither runs (exposed); to the host while none of them runs. So the parts add up to the step

The module imports no torch, so that it answers at once. Integers are nanoseconds.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan.base.untrusted import InputError
from titan.observe.step_parts import COMMUNICATION, HOST, MODULE

from .by_hand import written_by_hand
from .trace_kinds import CARRIED, HOOK, kind_of_kernel, kind_of_operator, surroundings

BACKWARD, RECOMPUTED = "backward", "recomputed"
_NODE = "autograd::engine::evaluate_function"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_EVENTS = 2_000_000  # they take 2 GB
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


_NUMBER = "Sequence number"
_DETAILS = (_NUMBER, "Input Dims", "Input type", "Process Group Description")
_LAST = {"copies": 1, COMMUNICATION: 2, HOST: 3}  # in this order, while no other work runs

Record = dict[str, Any]
"""Event of a trace as its file has it."""


@dataclass(slots=True, eq=False)
class TraceEvent:
    """Event of a host thread, and its place.

    Attributes:
        name: name of the event.
        is_operator: whether it is an operator of torch.
        thread: process and thread.
        begin: start time.
        end: end time.
        details: values of _DETAILS.
        parent: event that encloses it.
        module: name of its module, or "".
        within: surroundings (trace_kinds.py) of the event, its own included.
    """

    name: str
    is_operator: bool
    thread: Any
    begin: int
    end: int
    details: Record = field(default_factory=dict)
    parent: TraceEvent | None = None
    module: str = ""
    within: frozenset[str] = frozenset()


_NOWHERE = TraceEvent(
    "", False, None, 0, 0
)  # of idle time, and of kernels whose launch was not recorded


class TimeRange(NamedTuple):
    """Time in which the hardware worked for one of PARTS.

    Attributes:
        begin: start time.
        end: end time.
        part: the part.
        event: operator, or the launch of a kernel.
        name: name of the operator or the kernel.
        lane: thread of the host, or stream of the device.
    """

    begin: int
    end: int
    part: str
    event: TraceEvent
    name: str
    lane: Any


@dataclass
class TracedSteps:
    """Time of a trace's steps, in which each instant belongs to one range.

    Attributes:
        events: events of the host by their beginning, outer events first.
        exclusive: busy and idle times of the hardware, in order, without gaps or overlaps.
        begins: start times of the steps.
        note: for people, if torch's profiler has not marked the steps.
        is_gpu: whether the work are kernels.
    """

    events: list[TraceEvent]
    exclusive: list[TimeRange]
    begins: list[int]
    note: str
    is_gpu: bool

    @property
    def num_steps(self) -> int:
        """Return the number of steps."""
        return len(self.begins)

    @property
    def exposed_ms(self) -> list[float]:
        """Return the milliseconds of exposed communication of each step."""
        exposed_ms = [0.0] * self.num_steps
        for each in self.exclusive:
            if each.part == COMMUNICATION:
                step = bisect(self.begins, each.begin) - 1
                exposed_ms[step] += (each.end - each.begin) / 1e6
        return exposed_ms


def analyse(raw: Iterable[Record]) -> TracedSteps:
    """Analyse the events of a trace, in the form of Chrome's format. They are read once and not kept.

    Args:
        raw: events of the trace.

    Returns:
        The time of its steps.

    Raises:
        InputError: there are more than MAX_EVENTS events.
    """
    events, by_correlation, kernels = _sorted_out(raw)
    _find_places(events, is_gpu=bool(kernels))
    ranges = []
    for begin, end, name, stream, correlation in kernels:
        launch = by_correlation.get(correlation, _NOWHERE)
        part = kind_of_kernel(name, launch.within)
        ranges.append(TimeRange(begin, end, part, launch, name, stream))
    # The work of a CPU are its operators. Beside a GPU they say what an idle device waited for.
    for event in events:
        kind = kind_of_operator(event.name, event.within, is_operator=event.is_operator)
        part = HOST if kernels else kind
        ranges.append(TimeRange(event.begin, event.end, part, event, event.name, event.thread))
    if not ranges:
        raise ValueError("no operators, no kernels")
    begin, end = min(each.begin for each in ranges), max(each.end for each in ranges)
    # If nobody called the profiler's `step`, whole steps lie between the ends of two updates.
    updates = [event for event in events if event.name.startswith("Optimizer.step#")]
    ends = [event.end for event in updates if event.name == updates[0].name]
    begins, note = [begin], "no step was marked with torch.profiler's step(): all counts as one"
    if steps := [event for event in events if event.name.startswith("ProfilerStep#")]:
        begins, note = [event.begin for event in steps], ""
        if not kernels:  # the device finishes after the host
            end = max(event.end for event in steps)
    elif len(ends) > 1:
        *begins, end = ends
        note = f"steps were not marked with torch.profiler's step(): {len(begins)} from update to update"
    if begins[0] >= end:
        raise ValueError("its events take no time")
    return TracedSteps(events, _exclusive(ranges, begins[0], end), begins, note, bool(kernels))


def _span(record: Record) -> tuple[int, int]:
    # Traces count in microseconds, with fractions.
    begin = round(record["ts"] * 1000)
    return begin, begin + round((record.get("dur") or 0) * 1000)


def _sorted_out(
    raw: Iterable[Record],
) -> tuple[list[TraceEvent], dict[Any, TraceEvent], list[Any]]:
    """Sort the records of a trace.

    Returns:
        The host's events by their beginning, outer events first; launches by correlation id;
        begin, end, name, stream and correlation id of kernels.
    """
    events, by_correlation, kernels = [], {}, []
    for record in raw:
        category, details = record.get("cat"), record.get("args") or {}
        if category not in (*_KERNELS, *_ON_HOST) or record.get("ph") != "X":
            continue
        correlation = details.get("correlation")
        lane, name = (record.get("pid"), record.get("tid")), sys.intern(record["name"])
        if category in _KERNELS:
            kernels.append((*_span(record), name, lane, correlation))
        else:
            kept = {key: details[key] for key in _DETAILS if key in details}
            event = TraceEvent(name, category == "cpu_op", lane, *_span(record), kept)
            events.append(event)
            by_correlation[correlation] = event
        # Checked while reading, before memory runs out.
        if len(events) + len(kernels) > MAX_EVENTS:
            raise InputError(
                f"more than {MAX_EVENTS:,} events: record fewer steps: profiling.profiler_active"
            )
    by_correlation.pop(None, None)
    # An outer event begins no later and ends no earlier than its inner events.
    events.sort(key=lambda event: (event.begin, -event.end))
    return events, by_correlation, kernels


def _find_places(events: list[TraceEvent], *, is_gpu: bool) -> None:
    """Set parent, module and surroundings of each event. Parents come before children, forward before backward."""
    newest = {}  # module of each thread's last backward node
    forward = {}  # newest operator of each sequence number: it has made the node
    stacks = defaultdict(list)
    by_hand = written_by_hand(events, is_gpu=is_gpu)
    for event in events:
        number, stack = event.details.pop(_NUMBER, None), stacks[event.thread]
        while stack and stack[-1].end <= event.begin:
            stack.pop()
        if stack:
            # The enclosing event decides, unless the event itself has a place.
            parent = event.parent = stack[-1]
            event.module, event.within = parent.module, parent.within
            event.details = parent.details | event.details
        stack.append(event)
        if kind := surroundings(event.name, is_operator=event.is_operator):
            event.within |= {kind}
        if kind_by_hand := by_hand.get(event):
            event.within |= {kind_by_hand}
            event.module = event.module or "a function"
        if event.name.startswith((MODULE, HOOK)):
            event.module = event.name.removeprefix(MODULE)
            # A module that runs within the backward pass is recomputed (activation checkpointing).
            if BACKWARD in event.within:
                event.within |= {RECOMPUTED}
        elif kind == "optimizer":
            event.module = kind
        elif event.name.startswith(_NODE):
            event.within |= {BACKWARD}
            event.module = newest.get(event.thread, event.module)
            # A node without a number adds up a gradient of the node before it.
            if source := forward.get(number):
                event.module = source.module
                event.within |= source.within & CARRIED
            newest[event.thread] = event.module
        elif number is not None:
            forward[number] = event


def _exclusive(ranges: list[TimeRange], begin: int, end: int) -> list[TimeRange]:
    """Assign each instant from `begin` to `end` to one range: to work, then to communication, then to the host."""
    edges = []
    for number, each in enumerate(ranges):
        # Cut off time outside the step.
        start, stop = max(each.begin, begin), min(each.end, end)
        if start < stop:
            edges += [(start, number), (stop, number)]
    # Between two edges the running ranges do not change, so each stretch has one owner.
    running = {}
    exclusive, now = [], begin
    idle = TimeRange(begin, end, HOST, _NOWHERE, "", None)
    # A last edge at the end, for the stretch after the last range.
    for at, number in [*sorted(edges), (end, -1)]:
        if now < at:
            # The innermost event of a thread began last.
            innermost = {each.lane: each for each in running.values()}
            owner = min(
                innermost.values(), key=lambda each: _LAST.get(each.part, 0), default=idle
            )
            exclusive.append(owner._replace(begin=now, end=at))
            now = at
        if running.pop(number, None) is None and number >= 0:  # its first edge
            running[number] = ranges[number]
    return exclusive
