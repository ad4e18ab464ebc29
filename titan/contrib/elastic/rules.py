"""Rules for the replica groups of a job (README.md)."""

from __future__ import annotations

from collections.abc import Iterator

from titan.config.errors import RuleViolation
from titan.config.schema import JobConfig, streams

from .section import groups_of


def check_groups(config: JobConfig) -> Iterator[RuleViolation]:
    """Check the numbers of groups, and that a step can be undone."""
    section = groups_of(config)
    if not section.enable:
        return
    count = section.replica_groups
    if section.replica_id >= count:
        yield "replica_id", f"must be below replica_groups = {count}, got {section.replica_id}"
    if section.min_replicas > count:
        yield "min_replicas", f"is more than replica_groups = {count}"
    if not config.checkpoint.enable:
        yield "enable", "needs checkpoint.enable = true, for the case that all groups are lost"
    if config.training.enable_cpu_offload:
        yield (
            "enable",
            "cannot sum gradients on the host; set training.enable_cpu_offload = false",
        )
    where = section.lighthouse
    if where and not where.startswith(("http://", "/")):
        wants = "expected http://HOST:PORT, or the absolute path of a file that holds that"
        yield "lighthouse", f"{wants}, got {where!r}"
    if config.steps_in_backward:
        yield "enable", "cannot undo optimizer.early_step_in_backward; set that to false"
    if any(streams(source) for source in config.data.sources):
        yield "enable", "divides the samples again in each step, and no stream can do that"
    if config.phase:
        yield "phase[0]", "replica groups train one phase; set fault_tolerance.enable = false"
