"""Sums over a rank's step: the kernels and transfers that ran, and the causes of its compute stream's waits.

Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import Any, Literal, NamedTuple, TypeAlias

from titan.sim.record.segments import any_layer
from titan.sim.record.trace import Group, Launch, Transfer

Cause: TypeAlias = "Lane | Literal['host', 'peers']"
"""Cause of a stream's wait: another stream, work from the host, or ranks that have not reached its transfer."""
KernelGroup: TypeAlias = tuple[str, str, str, str]
"""Kernels that are counted together: kind, launcher, dtype and module."""
Sums = dict[str, float]
"""Seconds, bytes or numbers by axis, phase, kind or module."""
_zeros = partial(defaultdict, float)


@dataclass(slots=True, eq=False)
class Lane:
    """Past of a stream, or of a host. The first lane of a rank is its compute stream.

    Attributes:
        cuts: time and number of segments at the beginning and at the end of each step.
        segments: (start, end, Launch or Transfer that ran, or Cause of a wait), without overlap.
    """

    name: str
    cuts: list[tuple[float, int]]
    segments: list[tuple[float, float, Any]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Number of steps that have ended."""
        return len(self.cuts) - 1


class Interval(NamedTuple):
    """Launch or transfer that ran. Seconds count from the beginning of the step.

    Attributes:
        lane: "compute", "stream 3", "group pp".
        start: its beginning.
        end: its end.
        event: the launch or transfer.
    """

    lane: str
    start: float
    end: float
    event: Launch | Transfer


@dataclass
class RankTimeline:
    """Step of one rank.

    Five parts add up to the step:

        compute_s + exposed_s + peers_s + copies_s + host_s

    Attributes:
        rank: global rank.
        compute_s: kernels on the compute stream.
        exposed_s: waits of the compute stream for a running transfer, by axis.
        overlapped_s: transfers that run while the compute stream computes, by axis.
        sent_bytes: bytes of the transfers, by axis.
        num_sent: number of transfers, by axis.
        waiting_s: result of `waiting`.
        peers_s: waits for ranks that have not reached a transfer yet, or for the slowest rank at
            the end of the step.
        copies_s: waits for kernels of other streams.
        host_s: waits for the host.
        host_busy_s: time for which the host is busy, beside the device.
        by_phase_s: kernels by phase.
        by_kind_s: kernels by kind.
        by_module_s: kernels by module ("layers.*.attention.wq"), or by phase outside of modules.
        by_work_s: kernels by kind, launcher, dtype and module.
        span_s: time by phase, with the wait after each kernel.
        intervals: everything that ran on the device.
        host: everything that the host did, as a Lane's segments, on the clock of the intervals. The
            host is ahead of the device,
        so this begins before 0.
    """

    rank: int
    compute_s: float = 0.0
    exposed_s: Sums = field(default_factory=_zeros)
    overlapped_s: Sums = field(default_factory=_zeros)
    sent_bytes: Sums = field(default_factory=_zeros)
    num_sent: Sums = field(default_factory=_zeros)
    waiting_s: Sums = field(default_factory=dict)
    peers_s: float = 0.0
    copies_s: float = 0.0
    host_s: float = 0.0
    host_busy_s: float = 0.0
    by_phase_s: Sums = field(default_factory=_zeros)
    by_kind_s: Sums = field(default_factory=_zeros)
    by_module_s: Sums = field(default_factory=_zeros)
    by_work_s: dict[KernelGroup, float] = field(default_factory=_zeros)
    span_s: Sums = field(default_factory=_zeros)
    intervals: list[Interval] = field(default_factory=list)
    host: list[tuple[float, float, Any]] = field(default_factory=list)

    @property
    def bubble_s(self) -> float:
        """Time of waiting for other stages, or for their sends."""
        exposed = (s for axis, s in self.exposed_s.items() if "pp" in axis.split("+"))
        return self.peers_s + sum(exposed)


@dataclass
class Timeline:
    """Step of all traced ranks.

    Attributes:
        step_s: duration of the step.
        ranks: step of each rank.
    """

    step_s: float
    ranks: dict[int, RankTimeline]

    @property
    def bubble_fraction(self) -> float:
        """Mean of the ranks' bubbles as a share of the step."""
        return self.mean("bubble_s") / self.step_s if self.step_s else 0.0

    def mean(self, part: str) -> float:
        """Return the mean over ranks of compute_s, peers_s, copies_s, host_s or bubble_s."""
        return sum(getattr(rank, part) for rank in self.ranks.values()) / len(self.ranks)

    def mean_by(self, part: str) -> Sums:
        """Return the mean over ranks of a part that is a dict, such as exposed_s or by_phase_s."""
        total: Sums = defaultdict(float)
        for rank in self.ranks.values():
            for key, value in getattr(rank, part).items():
                total[key] += value / len(self.ranks)
        return dict(total)


def axis_of(group: Group) -> str:
    """Return a group's axes as one word.

    Args:
        group: the process group.

    Returns:
        A word such as "dp_shard+cp"; "one rank", or the group's name, for a group without axes.
    """
    return "+".join(group.axes) or ("one rank" if len(group.ranks) == 1 else group.name)


def lane_labels(intervals: Iterable[Interval], groups: Mapping[str, Group]) -> dict[str, str]:
    """Return labels of a rank's lanes with their content: "stream 3: all_gather dp_shard"."""
    carried = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for lane, start, end, event in intervals:
        if isinstance(event, Launch):
            what = event.kernel.name
        else:
            what = f"{event.kind} {axis_of(groups[event.group])}"
        carried[lane][what] += end - start
    labels = {}
    for lane, names in carried.items():
        # The two that take longest are enough to recognise it.
        most = nlargest(2, names, key=lambda name, names=names: names[name])
        labels[lane] = lane if lane == "compute" else f"{lane}: {', '.join(most)}"
    return labels


def summarise(
    rank: int,
    lanes: Sequence[Lane],
    transfers: Sequence[Interval],
    host: Lane,
    groups: Mapping[str, Group],
    *,
    step_s: float,
    origin: float,
) -> RankTimeline:
    """Return the sums over the last step of a rank.

    Args:
        rank: global rank.
        lanes: its streams, with the compute stream first.
        transfers: its transfers in the last step.
        host: its host.
        groups: its process groups.
        step_s: duration of the step over all ranks.
        origin: time from which intervals count.
    """
    result = RankTimeline(rank)
    (begin, first), (end, last) = lanes[0].cuts[-2:]
    # The compute stream decides where the time went: it ran a kernel, or it waited for something.
    phase = "forward"
    for start, stop, what in lanes[0].segments[first:last]:
        phase = what.scope.phase if isinstance(what, Launch) else phase
        result.span_s[phase] += stop - start
        if isinstance(what, Launch):
            result.compute_s += stop - start
            result.by_phase_s[what.scope.phase] += stop - start
            result.by_kind_s[what.kernel.kind] += stop - start
            # Equal blocks count together; the update of all parameters belongs to none.
            module, kernel = any_layer(what.scope.module) or what.scope.phase, what.kernel
            result.by_module_s[module] += stop - start
            result.by_work_s[kernel.kind, kernel.host, kernel.dtype, module] += stop - start
        else:
            _attribute(result, what, start, stop, groups)
    # A single step ends with its last stream. In consecutive steps, the rest overlaps with the next
    # step.
    if lanes[0].num_steps == 1:
        slowest = max(lanes, key=lambda lane: lane.cuts[-1][0])
        _attribute(result, slowest, end, slowest.cuts[-1][0], groups)
        end = slowest.cuts[-1][0]
    result.peers_s += step_s - (end - begin)  # the slowest rank is still busy
    # For charts: everything that ran on any stream.
    for lane in lanes:
        for start, stop, what in lane.segments[lane.cuts[-2][1] : lane.cuts[-1][1]]:
            if isinstance(what, Launch):
                result.intervals.append(
                    Interval(lane.name, start - origin, stop - origin, what)
                )
    for lane, start, stop, transfer in transfers:
        assert isinstance(transfer, Transfer)
        axis = axis_of(groups[transfer.group])
        result.overlapped_s[axis] += stop - start
        result.sent_bytes[axis] += transfer.size_bytes
        result.num_sent[axis] += 1
        result.intervals.append(Interval(lane, start - origin, stop - origin, transfer))
    (_, first), (_, last) = host.cuts[-2:]
    result.host = [(a - origin, b - origin, what) for a, b, what in host.segments[first:last]]
    result.host_busy_s = sum(b - a for a, b, what in result.host if not isinstance(what, Lane))
    # So far this is all time of transfers. Deduct the part that held up the compute stream.
    for axis, seconds in result.exposed_s.items():
        result.overlapped_s[axis] = max(0.0, result.overlapped_s[axis] - seconds)
    result.intervals.sort(key=lambda interval: interval.start)
    return result


def waiting(
    rank: RankTimeline, groups: Mapping[str, Group], slowest: float, busiest: float
) -> Sums:
    """Return the seconds that ranks wait for slower ones, on average, by kind of transfer.

    The traced rank is the slowest device, and the busiest rank of each dispatch: it waits for
    nobody, and its time is the step's. A rank of average speed finishes each kernel earlier, and
    waits at the next transfer. In a dispatch it sends to the busiest rank, whose links are full, so
    that it waits within the transfer.

    Args:
        rank: timeline of the traced rank.
        groups: its process groups.
        slowest: time of a kernel here, over the time on an average device.
        busiest: tokens of its experts, over the mean.
    """
    waited: Sums = defaultdict(float)
    early, first = 0.0, ""
    for _, start, end, event in rank.intervals:
        if isinstance(event, Launch):
            experts = busiest if "experts" in event.scope.module.split(".") else 1.0
            early += (end - start) * (1 - 1 / (slowest * experts))
        elif len(groups[event.group].ranks) > 1:
            if event.kind == "all_to_all" and "ep" in groups[event.group].axes:
                early += (end - start) * (1 - 1 / busiest)
            waited[event.kind] += early
            early, first = 0.0, first or event.kind
    # The time after the last transfer is waited for at the first transfer of the next step.
    return waited | ({first: waited[first] + early} if first else {})


def _attribute(
    result: RankTimeline, what: Any, start: float, stop: float, groups: Mapping[str, Group]
) -> None:
    """Charge idle time to its cause.

    If the cause is a stream that waited itself, charge that stream's causes.
    """
    if stop <= start:
        return
    if isinstance(what, Transfer):
        result.exposed_s[axis_of(groups[what.group])] += stop - start
    elif isinstance(what, Launch):
        result.copies_s += stop - start
    elif what == "peers":
        result.peers_s += stop - start
    elif what == "host":
        result.host_s += stop - start
    else:
        # Walk along the segments of the other stream, and charge each part to its own cause.
        at = start
        segments = what.segments
        index = max(0, bisect_right(segments, start, key=lambda segment: segment[0]) - 1)
        while index < len(segments) and segments[index][0] < stop:
            begin, end, inner = segments[index]
            if end > at:
                result.host_s += max(0.0, begin - at)  # the stream had nothing to do yet
                _attribute(result, inner, max(at, begin), min(end, stop), groups)
                at = min(end, stop)
            index += 1
        # The rest of the time the stream had ended all of its work.
        result.host_s += stop - at
