"""Simulation of a run beside it, which names the part that is responsible if the run drifts (README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan.run.hook import Hook
    from titan.run.progress import RunProgress


def twin_hook(run: RunProgress) -> Hook | None:
    """Return the hook of a run with `simulator.twin`."""
    section: Any = run.config.simulator
    if not section.twin:
        return None
    from .hook import Twin  # imports titan.ops

    return Twin(run)
