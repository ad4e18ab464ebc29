"""Base class of packages' additions to `titan check`. Imports no torch."""

from __future__ import annotations

from typing import Any

from titan.config.plug_ins import door, parts_of
from titan.config.schema import JobConfig


@door("check")
class CheckExtension:
    """Additional facts about a valid job, and their lines on the page.

    A package registers a subclass under the entry point group `titan.extensions` as check.NAME (titan/config/plug_ins.py).
    """

    def facts(self, config: JobConfig) -> dict[str, Any]:
        """Return additional facts about a job, for --json."""
        return {}

    def lines(self, facts: dict[str, Any]) -> list[str]:
        """Return additional lines of the page."""
        return []


def check_extensions() -> list[CheckExtension]:
    """Return an instance of each installed extension."""
    return [*parts_of(CheckExtension)]
