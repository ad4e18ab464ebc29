"""Contract of the optional parts of `titan check`. Imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from titan.config.plug_ins import door
from titan.config.schema import JobConfig


@door("check")
class CheckExtension:
    """Options of the command, facts about a valid job, and their lines on the page.

    A package registers a subclass under the entry point group `titan.extensions` as check.NAME
    (titan/config/plug_ins.py).

    Attributes:
        usage: the options, for the usage line.
        here: whether the question is about this machine, whose files and folders are then checked.
        device: kind of device of another machine, "cuda" or "cpu"; None: the trainer finds out.
    """

    usage: str = ""
    here: bool = True
    device: str | None = None

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the options."""

    def prepare(self, options: Namespace, job: list[str]) -> list[str]:
        """Return the files and overrides of a job, as the options change them.

        Raises:
            ConfigError: an option is wrong.
        """
        return job

    def facts(self, config: JobConfig, known: dict[str, Any]) -> dict[str, Any]:
        """Return additional facts about a job, for --json.

        Args:
            config: the job.
            known: the command's own facts, such as "memory_gib".
        """
        return {}

    def first_lines(self, facts: dict[str, Any]) -> list[str]:
        """Return lines above the page."""
        return []

    def lines(self, facts: dict[str, Any]) -> list[str]:
        """Return lines below the page."""
        return []
