"""Renumbering of the ranks in a trace, for a layout with another number of replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from titan.config.layout import AXES, Layout
from titan.sim.record import trace as events
from titan.sim.record.trace import Group, Trace, Transfer


def remap_ranks(trace: Trace, layout: Layout) -> Trace:
    """Return a trace as it would be under a layout with another number of replicas."""
    if trace.world_size == layout.world_size:
        return trace
    # The same layout with the trace's number of replicas.
    was = replace(
        layout, dp_replicate=layout.dp_replicate * trace.world_size // layout.world_size
    )

    def moved(rank: int) -> int:
        return _rank(_place(rank, was), layout)

    own = _place(trace.rank, was)

    def members(group: Group) -> tuple[int, ...]:
        # A group along axes has members that follow from the rank's position. Pairs of a send and a
        # receive lie along an axis and have two of its ranks.
        along_axes = {*group.axes} <= {*AXES} and len(group.ranks) == len(
            _members(own, group.axes, was)
        )
        return (
            _members(own, group.axes, layout) if along_axes else tuple(map(moved, group.ranks))
        )

    groups = {
        name: replace(group, ranks=members(group)) for name, group in trace.groups.items()
    }

    def with_peers(of_trace: Iterable[events.Event]) -> list[events.Event]:
        # Transfers without a peer, and all other events, are shared with the cached trace.
        return [
            replace(e, peer=moved(e.peer)) if isinstance(e, Transfer) and e.peer >= 0 else e
            for e in of_trace
        ]

    return replace(
        trace,
        rank=moved(trace.rank),
        world_size=layout.world_size,
        groups=groups,
        first_step=with_peers(trace.first_step),
        step=with_peers(trace.step),
    )


def _place(rank: int, layout: Layout) -> dict[str, int]:
    """Return the coordinates of a rank on the mesh, by axis."""
    place = {}
    # Ranks count row by row, with the last axis of AXES the fastest.
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, layout.degrees[axis])
    return place


def _rank(place: dict[str, int], layout: Layout) -> int:
    """Return the rank at a place on the mesh."""
    rank = 0
    for axis in AXES:
        rank = rank * layout.degrees[axis] + place[axis]
    return rank


def _members(place: dict[str, int], axes: Sequence[str], layout: Layout) -> tuple[int, ...]:
    """Return the ranks along some axes that pass through a place on the mesh."""
    along = itertools.product(*(range(layout.degrees[axis]) for axis in axes))
    return tuple(
        _rank(place | dict(zip(axes, numbers, strict=True)), layout) for numbers in along
    )
