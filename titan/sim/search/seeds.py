"""Layouts that a search begins with, and those that it cannot have. `titan plan` and layout = "auto" share them."""

from __future__ import annotations

from .candidates import LayoutSearch
from .point import Kind, Point


def seeds(search: LayoutSearch) -> list[Point]:
    """Choose data parallelism alone, and beside expert parallelism: it costs the host least, which the formula does not know."""
    return [p for spread in (False, True) for p in search.data_parallel(spreads_experts=spread)]


def lighter(search: LayoutSearch, point: Point, needed_gib: float) -> list[Point]:
    """Choose the best new point of data parallelism that should fit where another did not, as far as the formula was off there."""
    most = search.profile.usable_gib - needed_gib + search.estimated_gib(point)
    return search.data_parallel(spreads_experts=point.ep > 1, below_gib=most)


def refused(search: LayoutSearch, best: Point) -> list[Point]:
    """Return the first point of each kind that the formula ranks above `best` and the job's rules refuse."""
    tried = {*map(search.kind, search.seen)}
    found: dict[Kind, Point] = {}
    for point in search.points:
        if search.seconds(point) >= search.seconds(best):
            break
        kind = search.kind(point)
        if kind not in tried and not search.legal(point):
            found.setdefault(kind, point)
    return [*found.values()]
