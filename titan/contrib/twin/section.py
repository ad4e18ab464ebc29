"""Keys of the twin in [simulator], and their rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from titan.config.base import ReadWith, Section
from titan.config.errors import RuleViolation


class TwinSection(Section):
    """The twin of a run."""

    twin: bool = False
    """Simulate the job beside the run, and write predicted and measured times of each logged step.
    If the run drifts, name the part responsible. docs/simulator.md has the details."""
    twin_hardware: Annotated[str, ReadWith("twin")] = "auto"
    """Profile for the twin: a name or a file of titan sim. "auto": the device's profile; on a CPU "cpu",
    whose times are scaled to the first steps."""


def check_twin(config: Any) -> Iterator[RuleViolation]:
    """Check that the job has one phase."""
    if config.phase and config.simulator.twin:
        yield "twin", "simulates one phase, and this job has several; use false"
