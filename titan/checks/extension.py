"""Base class of what a package adds to `titan check`. Imports no torch."""

from __future__ import annotations

from typing import Any

from titan.config.plug_ins import load_plug_ins
from titan.config.schema import JobConfig


class CheckExtension:
    """Facts about a valid job, and their lines on the page.

    A package registers a subclass under the entry point group `titan.extensions` as check.NAME (titan/config/plug_ins.py).
    """

    def facts(self, config: JobConfig) -> dict[str, Any]:
        """Return more facts, for --json."""
        return {}

    def lines(self, facts: dict[str, Any]) -> list[str]:
        """Return more lines of the page."""
        return []


def check_extensions() -> list[CheckExtension]:
    """Return an instance of each extension that is installed."""
    return [extension() for extension in load_plug_ins("titan.extensions", of="check")]
