"""Detection of the part of a run that has become slow: a rank, a link, data, the allocator, saving, a host.

The fastest consecutive rows of a run that has settled say how long each part of a step takes, and
later rows are compared with them. The prediction counts if it says 0: no wait for data is expected,
and no retry of the allocator. (A slow rank is also compared with the other ranks, by
titan/ops/ranks.py, from the first step on.)

Machines are noisy, and a false alarm costs trust. So a part must cost a good share of a step in the
median of the last rows, and half of that in their best eighth, which other programs on the machine
do not spoil. On a CPU, whose cores all ranks and other programs share, only the excess of a rank
over the others counts. Nothing measures a link during training: a step that is slow without any
part that explains it makes the run measure its links, and the same link must be slow in two
measurements.

This file decides. titan/contrib/twin/hook.py measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, quantiles

from titan.ops.ranks import SLOW, WINDOW_STEPS


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the noise.

    Attributes:
        share: Share of a step's expected time. A cheaper part is not worth a message.
        growth: Growth of a rank's own time over that of the others. A rank above it is slow.
        unexplained: Growth of a step without a known reason. Above it, the run measures its links.
        link: Growth of a link's time. A link above it is slow.
    """

    share: float
    growth: float
    unexplained: float
    link: float


SHARED_CORES = Limits(share=0.15, growth=SLOW, unexplained=1.25, link=1.75)
OWN_DEVICES = Limits(share=0.05, growth=1.1, unexplained=1.1, link=1.4)
_SETTLING_ROWS = 2  # the first rows compile, connect and fill caches
_SAVES = 3  # saves that are compared with the first ones


@dataclass(frozen=True, kw_only=True)
class RowTimes:
    """Measurements of a logged row, in seconds per step. Lists have an entry for each rank.

    Attributes:
        step_s: Step without validation and saving.
        own_s: Computation in the forward passes of blocks.
        data_s: Waits for data.
        host_s: Time in the loop and its hooks.
        retries: Number of times that the allocator gave back its cache since the last row.
        save_s: Time for which training stopped for a save since the last row.
        num_steps: Steps since the last row.
    """

    step_s: float
    own_s: Sequence[float]
    data_s: Sequence[float]
    host_s: Sequence[float]
    retries: Sequence[float]
    save_s: float = 0.0
    num_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Link that became slow.

    Attributes:
        axis: Axis of the mesh.
        ranks: Its two ranks.
        ratio: Its time over the earlier time.
        cost_s: Estimated cost for the bytes of a step.
    """

    axis: str
    ranks: tuple[int, int]
    ratio: float
    cost_s: float


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Part that has become slow.

    Attributes:
        part: Name of the part.
        text: Description for people.
        ranks: Ranks concerned.
        cost_s: Cost in seconds per step.
        ratio: Time of the step over the expected time.
    """

    part: str
    text: str
    ranks: tuple[int, ...] = ()
    cost_s: float
    ratio: float = 1.0


class DriftWatch:
    """Detector of drift, which takes one row at a time.

    Attributes:
        num_rows: Number of rows that are judged together.
        current: The drift, or None.
        suspects_link: Whether the steps are slow for no known reason, so that links should be
            measured.
    """

    def __init__(self, *, log_freq: int, shares_cores: bool, same_work: bool = True) -> None:
        """Begin without rows.

        Args:
            log_freq: Steps from one row to the next.
            shares_cores: Whether ranks compute on the same processors.
            same_work: Whether all ranks have equally much work. Stages of a pipeline do not.
        """
        self.num_rows = max(5, WINDOW_STEPS // log_freq)
        self._shares_cores, self._same_work = shares_cores, same_work
        self._limits = SHARED_CORES if shares_cores else OWN_DEVICES
        self._rows = deque[RowTimes](maxlen=self.num_rows)
        self._base: list[RowTimes] = []
        self._saves: list[tuple[float, int]] = []  # seconds, and steps since the one before
        self._steps_since_save = self._count = 0
        self._links = deque[SlowLink | None](maxlen=2)
        self.current: Drift | None = None
        self.suspects_link = False

    @property
    def expected_s(self) -> float:
        """Time of a step once the run has settled; 0 before."""
        return median(row.step_s for row in self._base) if self._base else 0.0

    @property
    def _step_s(self) -> float:
        """Time of a step in the last rows."""
        return median(row.step_s for row in self._rows)

    def add(self, row: RowTimes) -> Drift | None:
        """Take the next row, and return the drift, if there is any."""
        self._count += 1
        self._steps_since_save += row.num_steps
        if row.save_s > 0:
            self._saves.append((row.save_s, self._steps_since_save))
            self._steps_since_save = 0
        if self._count > _SETTLING_ROWS:
            self._rows.append(row)
        if not self._base and len(self._rows) == self.num_rows:
            self._base = list(self._rows)
        if self._count >= _SETTLING_ROWS + 2 * self.num_rows:
            self.current = self._judge()
            # Another program on the machine has ended: later rows are compared with these.
            if self.current is None and self._step_s < self.expected_s:
                self._base = list(self._rows)
        return self.current

    def measured_links(self, links: Sequence[SlowLink]) -> None:
        """Take a measurement of all links, each against the first measurement."""
        slowest = max(links, key=lambda link: link.ratio, default=None)
        # A small part of a step is mostly noise. The cost is known to about a factor of two.
        least_s = 0.5 * self._limits.share * self.expected_s
        is_slow = slowest and slowest.ratio > self._limits.link and slowest.cost_s > least_s
        self._links.append(slowest if is_slow else None)

    def _judge(self) -> Drift | None:
        """Return the part that costs most, if any part is slow."""
        expected_s = self.expected_s
        ratio, excess_s = self._step_s / expected_s, self._step_s - expected_s
        found = [drift for drift in self._parts(excess_s) if self._matters(drift, expected_s)]
        # A link that is reported stays until it costs half as much.
        is_link = self.current is not None and self.current.part == "link"
        limit = 1 + (self._limits.unexplained - 1) * (0.5 if is_link else 1.0)
        self.suspects_link = not found and ratio > limit
        if not self.suspects_link:
            self._links.clear()
        elif (link := self._slow_link()) is not None:
            a, b = link.ranks
            text = f"the link between ranks {a} and {b} ({link.axis}) takes {link.ratio:.1f} times as long as it did"
            found = [Drift(part="link", text=text, ranks=link.ranks, cost_s=excess_s)]
        worst = max(found, key=lambda drift: drift.cost_s, default=None)
        if worst is None:
            return None
        # The cost of retries is not measured separately: they come first, and are charged with the whole growth of a step.
        cost_s = worst.cost_s if worst.cost_s < inf else max(excess_s, 0.0)
        return replace(worst, ratio=ratio, cost_s=cost_s)

    def _slow_link(self) -> SlowLink | None:
        """Return the link that was the slowest in both of the last two measurements."""
        slow = [link for link in self._links if link]
        is_same = len(slow) == 2 and slow[0].ranks == slow[1].ranks
        return slow[1] if is_same else None

    def _matters(self, drift: Drift, expected_s: float) -> bool:
        """Return whether a part costs enough.

        A part that is reported already stays until it costs half as much.
        """
        now = self.current
        is_known = now is not None and (now.part, now.ranks) == (drift.part, drift.ranks)
        return drift.cost_s >= self._limits.share * expected_s * (0.5 if is_known else 1.0)

    def _parts(self, excess_s: float) -> Iterable[Drift]:
        """Yield the parts that may cost more than before. excess_s: growth of a step."""
        yield from self._allocator()
        yield from self._saving(max(1.0, 1 + excess_s / self.expected_s))
        num_ranks = len(self._base[0].own_s)
        before = [max(_mid(self._base, "own_s", rank), 1e-9) for rank in range(num_ranks)]
        growth = [1 + self._cost("own_s", rank) / before[rank] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            yield from self._slow_rank(rank, before, growth, excess_s)
            yield from self._waits(rank, num_ranks)
        # All alike: power, or temperature. On shared cores it is other programs.
        if not self._shares_cores and min(growth) > self._limits.growth:
            text = f"all devices compute {min(growth):.2f} times as long as they did"
            cost_s = (min(growth) - 1) * min(before) * self._rest
            yield Drift(part="devices", text=text, cost_s=min(cost_s, excess_s))

    def _slow_rank(
        self, rank: int, before: Sequence[float], growth: Sequence[float], excess_s: float
    ) -> Iterable[Drift]:
        """Yield a rank that computes longer than before, or longer than the others."""
        others = [other for other in range(len(before)) if other != rank]
        if not others:
            return
        # Others that became slow as well, as from another program, are the measure.
        common = max(1.0, median(growth[other] for other in others))
        cost_s, text = (growth[rank] - common) * before[rank], "it did"
        if self._same_work:
            others_s = median(_mid(self._rows, "own_s", other) for other in others)
            ahead_s = self._cost("own_s", rank, expected_s=others_s)
            # Slow from the first row on: there was no time before.
            if ahead_s > max(cost_s, (self._limits.growth - 1) * others_s):
                cost_s, text = ahead_s, "the others do"
        now_s = _mid(self._rows, "own_s", rank)
        factor = now_s / max(now_s - cost_s, 1e-9)
        if factor > self._limits.growth:
            # The forward passes alone are timed. Elsewhere its step is as slow, but costs no more than the step does.
            if not self._shares_cores:
                cost_s = max(cost_s, min(cost_s * self._rest, excess_s))
            text = f"rank {rank} computes {factor:.1f} times as long as {text}"
            yield Drift(part="rank", text=text, ranks=(rank,), cost_s=cost_s)

    def _waits(self, rank: int, num_ranks: int) -> Iterable[Drift]:
        """Yield a rank's losses to data and to its host."""
        data_s = self._cost("data_s", rank, expected_s=0.0)
        yield Drift(
            part="data", text=f"rank {rank} waits for data", ranks=(rank,), cost_s=data_s
        )
        others = [self._cost("host_s", other) for other in range(num_ranks) if other != rank]
        common_s = max(0.0, median(others)) if others and self._shares_cores else 0.0
        host_s = self._cost("host_s", rank) - common_s
        text = f"the host of rank {rank} is busy between steps"
        yield Drift(part="host", text=text, ranks=(rank,), cost_s=host_s)

    def _cost(self, part: str, rank: int, *, expected_s: float | None = None) -> float:
        """Return the additional seconds of a part over the earlier or the expected time.

        This is the median, but at most twice the best eighth.
        """
        values = [getattr(row, part)[rank] for row in self._rows]
        if expected_s is None:
            expected_s = _mid(self._base, part, rank)
        low = quantiles(values, n=8, method="inclusive")[0]
        return min(median(values) - expected_s, 2 * (low - expected_s))

    def _allocator(self) -> Iterable[Drift]:
        """Yield ranks whose allocator gives back its cache again and again."""
        for rank in range(len(self._base[0].retries)):
            with_retries = sum(row.retries[rank] > 0 for row in self._rows)
            # The prediction is none at all. One that comes alone, as after a validation, is no drift.
            if with_retries > len(self._rows) / 2:
                text = f"rank {rank} is short of memory: its allocator gives its cache back, and allocates again"
                yield Drift(part="allocator", text=text, ranks=(rank,), cost_s=inf)

    def _saving(self, ratio: float) -> Iterable[Drift]:
        """Yield the cost of saves that have become slow."""
        if len(self._saves) < 2 * _SAVES:
            return
        first = median(seconds for seconds, _ in self._saves[:_SAVES])
        # Other programs on the same cores slow saves and steps alike.
        first *= ratio if self._shares_cores else 1.0
        newest = self._saves[-_SAVES:]
        now, best = median(s for s, _ in newest), min(s for s, _ in newest)
        if best > SLOW * first:
            text = f"saving takes {now:.2f} s, and took {first:.2f} s"
            cost_s = (now - first) / median(steps for _, steps in newest)
            yield Drift(part="checkpoint", text=text, cost_s=cost_s)

    @property
    def _rest(self) -> float:
        """Ratio of a step to the forward passes of its blocks."""
        return median(row.step_s / max(*row.own_s, 1e-9) for row in self._base)


def _mid(rows: Sequence[RowTimes], part: str, rank: int) -> float:
    """Return the median of a part over rows, for one rank."""
    return median(getattr(row, part)[rank] for row in rows)
