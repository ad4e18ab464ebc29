"""Comparison of a run with its simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.run.hook import Hook
    from titan.run.progress import RunProgress


def twin_hook(run: RunProgress) -> Hook | None:
    """Return the hook of a run with `simulator.twin`."""
    if not run.config.simulator.twin:
        return None
    from .hook import Twin  # imports titan.ops

    return Twin(run)
