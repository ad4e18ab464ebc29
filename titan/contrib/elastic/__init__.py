"""Replica groups that join and leave a run, on torchft."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.run.hook import Hook
    from titan.run.progress import RunProgress


def hook(run: RunProgress) -> Hook | None:
    """Return the hook of a run with `fault_tolerance.enable`."""
    from .section import groups_of

    if not groups_of(run.config).enable:
        return None
    from .membership import Elastic  # imports torchft

    return Elastic(run)
