"""Facts about the transfers of a simulated step: by axis, exposed and hidden, and the bytes over network cards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from titan.sim.price.network import Dispatch, card_bytes
from titan.sim.price.profiles import Profile
from titan.sim.record.trace import Trace, Transfer
from titan.sim.replay.timeline import Timeline, axis_of


def communication(
    timeline: Timeline, traces: Mapping[int, Trace], profile: Profile, dispatch: Dispatch | None
) -> dict[str, Any]:
    """Return the facts about the transfers of traced ranks."""
    # Means over the traced ranks, one of each stage, as for all times on the page.
    mean_by = timeline.mean_by
    sent = defaultdict[str, float](float)
    for rank, trace in traces.items():
        for event in trace.step:
            if isinstance(event, Transfer):
                group = trace.groups[event.group]
                num_bytes = card_bytes(event, group, profile, dispatch=dispatch, rank=rank)
                sent[axis_of(group)] += num_bytes / len(traces)
    exposed, overlapped, volume = map(mean_by, ("exposed_s", "overlapped_s", "sent_bytes"))
    return {
        "exposed_s": sum(exposed.values()),
        "overlapped_s": sum(overlapped.values()),
        "waiting_s": mean_by("waiting_s"),
        "by_axis": {
            axis: {
                "exposed_s": exposed.get(axis, 0.0),
                "overlapped_s": overlapped.get(axis, 0.0),
                "bytes": round(volume[axis]),
                "card_bytes": round(sent[axis]),
                "count": round(count),
            }
            for axis, count in sorted(mean_by("num_sent").items())
        },
    }
