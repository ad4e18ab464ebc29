"""Analysis of a trace of torch's profiler: the time of a step by kind of work and by module.

    intervals   busy times of the hardware: kernels of a GPU's streams; on a CPU each operator's self time,
                when it was the innermost event of its thread
    place       the module whose range (profiler.py) encloses the operator, or for a kernel the operator that launched
                it; a backward operator belongs to the forward operator that the profiler links it to
    sweep       at each instant the step's time goes to the work under way, in even shares; to communication only while
                no work runs (exposed); to the host while neither runs. So the parts add up to the step

The module imports no torch, so that it answers at once. Integers are nanoseconds.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from titan.observe.step_parts import COMMUNICATION, HOST, MODULE, PARTS

from .trace_kinds import kind_of_kernel, kind_of_operator, surroundings

ELSEWHERE = "(elsewhere)"
PHASES = ("forward", "recompute", "backward")
_NODE = "autograd::engine::evaluate_function"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_EVENTS = 2_000_000  # they take 2 GB
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


Record = dict[str, Any]
"""Event of a trace as its file has it."""


class TooLarge(Exception):
    """Error: a trace has more than MAX_EVENTS events."""


@dataclass(slots=True, eq=False)
class TraceEvent:
    """Event of a host thread, and its place.

    Attributes:
        name: name of the event.
        is_operator: whether it is an operator of torch.
        thread: process and thread.
        begin: start time.
        end: end time.
        parent: event that encloses it.
        module: name of its module, or "".
        phase: item of PHASES, or "" outside forward and backward.
        within: surroundings (trace_kinds.py) of the event, its own included.
    """

    name: str
    is_operator: bool
    thread: Any
    begin: int
    end: int
    parent: TraceEvent | None = None
    module: str = ""
    phase: str = ""
    within: frozenset[str] = frozenset()


class _Kernel(NamedTuple):
    """Kernel of a GPU, and the id that it shares with its launch."""

    begin: int
    end: int
    name: str
    correlation: int | None


class _Flow(NamedTuple):
    """End of an arrow from a forward operator ("s") to a backward node ("f"), which have the same id."""

    phase: str
    number: int
    place: tuple[Any, int]


class TimeRange(NamedTuple):
    """Time in which the hardware worked for one of PARTS, at the place of `event`."""

    begin: int
    end: int
    part: str
    event: TraceEvent


@dataclass
class Report:
    """Seconds of one step, the mean of num_steps.

    Attributes:
        device: "gpu" or "cpu".
        num_steps: steps of the trace.
        step_s: seconds of a step.
        parts_s: seconds by part. They add up to step_s.
        communication_hidden_s: communication behind work, which is in no part.
        calls: kernels or operators of a step, by part.
        modules_s: seconds by module in the order of the forward pass, then by PHASES and
            "total". The totals add up to step_s.
    """

    device: str
    num_steps: int
    step_s: float
    parts_s: dict[str, float]
    communication_hidden_s: float
    calls: dict[str, float]
    modules_s: dict[str, dict[str, float]] = field(default_factory=dict)


def analyse(raw: Iterable[Record]) -> Report:
    """Analyse the events of a trace, in the form of Chrome's format. They are read once and not kept.

    Args:
        raw: events of the trace.

    Returns:
        Report of a step.

    Raises:
        TooLarge: there are more than MAX_EVENTS events.
    """
    events, by_correlation, kernels, flows = _sorted_out(raw)
    self_times = _nest(events)
    _find_places(events, links=_links(flows, events))
    # For kernels whose launch was not recorded.
    nowhere = TraceEvent("", False, None, 0, 0)
    intervals = []
    for kernel in kernels:
        launch = by_correlation.get(kernel.correlation, nowhere)
        part = kind_of_kernel(kernel.name, launch.within)
        intervals.append(TimeRange(kernel.begin, kernel.end, part, launch))
    # A trace of a CPU has no kernels: the operators' self times are the work.
    is_gpu = bool(intervals)
    calls = Counter(interval.part for interval in intervals)
    if not is_gpu:
        parts = {
            e: kind_of_operator(e.name, e.within, is_operator=e.is_operator) for e in events
        }
        outer = [e for e in events if e.parent is None or COMMUNICATION not in e.parent.within]
        calls = Counter(
            parts[e] for e in outer
        )  # a step of a collective is not a separate call
        intervals = [TimeRange(start, stop, parts[e], e) for e, start, stop in self_times]
    # The profiler marks each step. A trace without marks counts as one step.
    steps = [event for event in events if event.name.startswith("ProfilerStep#")]
    begin, end = min(e.begin for e in steps or events), max(e.end for e in steps or events)
    if is_gpu:  # the device finishes after the host
        end = max(end, *(interval.end for interval in intervals))
    times, hidden = _sweep(intervals, begin, end)
    num_steps = len(steps) or 1
    # From nanoseconds of all steps to seconds of one.
    scale = 1e-9 / num_steps
    report = Report(
        device="gpu" if is_gpu else "cpu",
        num_steps=num_steps,
        step_s=(end - begin) * scale,
        parts_s=dict.fromkeys(PARTS, 0.0),
        communication_hidden_s=hidden * scale,
        calls={part: calls[part] / num_steps for part in PARTS if part != HOST},
        # Modules in the order in which they first ran.
        modules_s={
            name: dict.fromkeys([*PHASES, "total"], 0.0)
            for name in dict.fromkeys([*(e.module for e in events if e.module), ELSEWHERE])
        },
    )
    for (part, module, phase), time in times.items():
        report.parts_s[part] += time * scale
        for column in filter(None, (phase, "total")):
            report.modules_s[module or ELSEWHERE][column] += time * scale
    return report


def _span(record: Record) -> tuple[int, int]:
    # Traces count in microseconds, with fractions.
    begin = round(record["ts"] * 1000)
    return begin, begin + round(record.get("dur", 0) * 1000)


def _sorted_out(
    raw: Iterable[Record],
) -> tuple[list[TraceEvent], dict[int | None, TraceEvent], list[_Kernel], list[_Flow]]:
    """Sort the records of a trace.

    Returns:
        The host's events by their beginning, outer events first; launches by correlation id;
        kernels; flows.
    """
    events, by_correlation, kernels, flows = [], {}, [], []
    for record in raw:
        category = record.get("cat")
        correlation = record.get("args", {}).get("correlation")
        if category in _KERNELS:
            kernels.append(_Kernel(*_span(record), sys.intern(record["name"]), correlation))
        elif category == "fwdbwd":
            place = (record["pid"], record["tid"]), _span(record)[0]
            flows.append(_Flow(record["ph"], record["id"], place))
        elif category in _ON_HOST and record["ph"] == "X":
            # Beginning and end of an event on a thread never cross, so nesting follows from times.
            thread = (record["pid"], record["tid"])
            name = sys.intern(record["name"])
            event = TraceEvent(name, category == "cpu_op", thread, *_span(record))
            events.append(event)
            if correlation is not None:
                by_correlation[correlation] = event
        # Checked while reading, before memory runs out.
        if len(events) + len(kernels) + len(flows) > MAX_EVENTS:
            raise TooLarge
    # An outer event begins no later and ends no earlier than its inner events.
    events.sort(key=lambda event: (event.begin, -event.end))
    return events, by_correlation, kernels, flows


def _nest(events: list[TraceEvent]) -> list[tuple[TraceEvent, int, int]]:
    """Set each event's parent. Return the stretches in which an event was the innermost of its thread."""
    stretches = []
    stacks = defaultdict[Any, list[TraceEvent]](list)
    since: dict[Any, int] = {}  # time up to which a thread's time is distributed

    def advance(thread: Any, to: int) -> None:
        stack = stacks[thread]
        # Give the time up to `to` to the events on the stack, innermost first, and drop ended events.
        while stack and since[thread] < to:
            event = stack[-1]
            until = min(event.end, to)
            if until > since[thread]:
                stretches.append((event, since[thread], until))
                since[thread] = until
            if event.end <= to:
                stack.pop()

    for event in events:
        advance(event.thread, event.begin)
        stack = stacks[event.thread]
        event.parent = stack[-1] if stack else None
        stack.append(event)
        since[event.thread] = event.begin
    for thread, stack in stacks.items():
        advance(thread, max(event.end for event in stack))
    return stretches


def _links(flows: list[_Flow], events: list[TraceEvent]) -> dict[TraceEvent, TraceEvent]:
    """Map each backward node to its forward operator, by the profiler's flow events."""
    # If several events begin together, the innermost comes last.
    at = {(event.thread, event.begin): event for event in events if event.is_operator}
    forward, links = {}, {}
    for flow in sorted(flows, key=lambda flow: flow.phase, reverse=True):  # "s", then "f"
        event = at.get(flow.place)
        if flow.phase == "s":
            forward[flow.number] = event
        elif event is not None and (source := forward.get(flow.number)) is not None:
            # The link belongs to the autograd node, which may enclose the operator that the flow
            # points at.
            is_inner = event.parent is not None and event.parent.name.startswith(_NODE)
            links[event.parent if is_inner else event] = source
    return links


def _find_places(events: list[TraceEvent], *, links: dict[TraceEvent, TraceEvent]) -> None:
    """Set module, phase and surroundings of each event. Parents come before children, forward before backward."""
    newest: dict[Any, str] = {}  # module of each thread's last backward node
    for event in events:
        if event.parent is not None:
            # The enclosing event decides, unless the event itself has a place.
            event.module, event.phase = event.parent.module, event.parent.phase
            event.within = event.parent.within
        if kind := surroundings(event.name, is_operator=event.is_operator):
            event.within |= {kind}
        if event.name.startswith(MODULE):
            event.module = event.name.removeprefix(MODULE)
            # A module that runs within the backward pass is recomputed (activation checkpointing).
            event.phase = "recompute" if event.phase in ("backward", "recompute") else "forward"
        # torch names the range of an optimizer's step.
        elif event.name.startswith("Optimizer."):
            event.module, event.phase = "optimizer", ""
        elif event in links or event.name.startswith(_NODE):
            event.phase = "backward"
            # A node without a link adds up a gradient of the node before it.
            source = links.get(event)
            event.module = source.module if source else newest.get(event.thread, event.module)
            newest[event.thread] = event.module


def _sweep(
    intervals: list[TimeRange], begin: int, end: int
) -> tuple[dict[tuple[str, str, str], float], int]:
    """Distribute the time of the steps over the intervals.

    Returns:
        Time by (part, module, phase), which adds up to end - begin, and the time of hidden
        communication.
    """
    edges = []
    for number, interval in enumerate(intervals):
        # Cut off time outside the step.
        start, stop = max(interval.begin, begin), min(interval.end, end)
        if start < stop:
            edges += [(start, number), (stop, number)]
    # Between two edges the set of running intervals does not change, so distribute each stretch at once.
    times = defaultdict[tuple[str, str, str], float](float)
    work: dict[int, TimeRange] = {}
    communication: dict[int, TimeRange] = {}
    host: dict[int, TimeRange] = {}
    now, hidden = begin, 0
    # A last edge at the end, for the stretch after the last interval.
    for at, number in [*sorted(edges), (end, -1)]:
        elapsed, now = at - now, at
        if elapsed and work:
            for one in work.values():
                times[one.part, one.event.module, one.event.phase] += elapsed / len(work)
            hidden += elapsed if communication else 0
        elif elapsed:
            # gloo's threads know no module, but the main thread waits for them in a module.
            there = chain(communication.values(), host.values())
            module, phase = next(
                ((i.event.module, i.event.phase) for i in there if i.event.module), ("", "")
            )
            times[COMMUNICATION if communication else HOST, module, phase] += elapsed
        if number >= 0:
            interval = intervals[number]
            active = {COMMUNICATION: communication, HOST: host}.get(interval.part, work)
            if active.pop(number, None) is None:  # its first edge
                active[number] = interval
    return dict(times), hidden
