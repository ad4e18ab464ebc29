"""Keys that replica groups add to [fault_tolerance] and [simulator]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field

from titan.config.base import NonNegative, Permission, Positive, Section

if TYPE_CHECKING:
    from titan.config.schema import JobConfig


class GroupsSection(Section):
    """Replica groups: their number, and how they find each other."""

    enable: bool = False
    """Train in replica groups that may come and go, on torchft (titan/contrib/elastic/README.md). Needs the extra `elastic`."""
    replica_groups: Positive = 1
    """Replica groups at full strength. training.global_batch_size is that of all of them together."""
    replica_id: NonNegative = 0
    """Number of this group, from 0. `titan train --elastic` sets it."""
    min_replicas: Positive = 1
    """Groups without which no step is made: fewer wait for the others."""
    lighthouse: Annotated[str, Permission("network")] = ""
    """Address of torchft's lighthouse, such as "http://node0:29510", or the absolute path of a file that holds
    it and is read again while nobody answers. Empty: the variable TORCHFT_LIGHTHOUSE."""
    healing_timeout_seconds: Positive = 600
    """Seconds in which a group that comes back must get a peer's state. The others wait meanwhile. After two
    failures it ends, and they go on."""
    process_group_timeout_ms: Positive = 60_000
    """Milliseconds that a group waits for the others' part of a sum, in which they may still compute. After
    that the step is repeated."""

    @property
    def num_groups(self) -> int:
        """Return how many copies of the job's layout train together, for titan.config.layout."""
        return self.replica_groups if self.enable else 1

    @property
    def group_number(self) -> int:
        """Return the number of this run's copy."""
        return self.replica_id if self.enable else 0


class LinkSection(Section):
    """The link between replica groups, for `titan sim`."""

    group_link_gbit_per_s: Annotated[float | None, Field(gt=0)] = None
    """Gbit/s that each rank has of the link between replica groups (titan/contrib/elastic/README.md). Unset: its network card's."""
    group_link_latency_us: Annotated[float, Field(ge=0)] = 0.0
    """Microseconds of that link, one way, on top of those between two nodes."""


def groups_of(config: JobConfig) -> GroupsSection:
    """Return [fault_tolerance] with the keys of replica groups."""
    return cast("GroupsSection", config.fault_tolerance)


def link_of(config: JobConfig) -> LinkSection:
    """Return [simulator] with the keys of the link."""
    return cast("LinkSection", config.simulator)
