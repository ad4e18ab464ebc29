"""Keys that replica groups add to [fault_tolerance]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

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


def groups_of(config: JobConfig) -> GroupsSection:
    """Return [fault_tolerance] with the keys of replica groups."""
    return cast("GroupsSection", config.fault_tolerance)
