"""Layouts that a search has simulated, and those to simulate first. `titan plan` and layout = "auto" share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .candidates import LayoutSearch
from .point import Point, Settings
from .variants import Variant


class Exploration:
    """Simulated layouts of a search.

    Attributes:
        search: the search, which chooses the layouts.
        tried: the layouts that were simulated.
    """

    def __init__(self, search: LayoutSearch) -> None:
        self.search, self.tried = search, dict[Point, Variant]()

    def seeds(self) -> list[Point]:
        """Choose data parallelism alone, and beside expert parallelism.

        It costs the host least, which the formula does not know.
        """
        choose = self.search.data_parallel
        return [*choose(spreads_experts=False), *choose(spreads_experts=True)]

    def lighter(self, points: Iterable[Point]) -> list[Point]:
        """Choose the best new point of data parallelism that should fit, for each point that does not.

        The formula is taken to be as far off as it was there.
        """
        search, found = self.search, list[Point]()
        for point in points:
            variant = self.tried[point]
            if not (variant.fits or variant.problem):
                free_gib = search.profile.usable_gib - variant.needed_gib
                most = free_gib + search.estimated_gib(point)
                found += search.data_parallel(spreads_experts=point.ep > 1, below_gib=most)
        return found

    def simulate(self, points: Sequence[Point], *others: Settings) -> list[Variant]:
        """Simulate points, and return the job with other settings.

        Points that a stop left out are not noted as tried.
        """
        search = self.search
        found = search([*others, *map(search.settings, points)])
        pairs = zip(points, found[len(others) :], strict=True)
        has_all = not search.stopped
        self.tried |= {p: one for p, one in pairs if has_all or one.facts or one.problem}
        return found[: len(others)]

    def ranked(self, own: Point | None) -> list[Point]:
        """Return the tried points that run: first those that fit, the fastest first.

        The job's own is the last of equals.
        """
        runs = (p for p, variant in self.tried.items() if variant.fits or variant.is_tight)
        order = {p: (self.tried[p].is_tight, -self.tried[p].speed, p == own) for p in runs}
        return sorted(order, key=order.__getitem__)

    @property
    def fitting(self) -> list[Point]:
        """Tried points that fit, the fastest first."""
        fits = [point for point, variant in self.tried.items() if variant.fits]
        return sorted(fits, key=lambda point: -self.tried[point].speed)
