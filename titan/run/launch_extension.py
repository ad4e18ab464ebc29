"""Base class of packages' additions to `titan train`. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from titan.config.schema import JobConfig


class LaunchExtension:
    """Another way of `titan train` to start its processes.

    A package registers a subclass under the entry point group `titan.extensions` as train.NAME (titan/config/plug_ins.py).

    Attributes:
        usage: its options in the usage line.
    """

    usage = ""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options to the command."""

    def launch(
        self, options: argparse.Namespace, argv: Sequence[str], load: Callable[[int], JobConfig]
    ) -> int | None:
        """Start the processes, wait for them, and return the exit code. None: the options do not ask for it.

        Args:
            options: options of the command.
            argv: the files and overrides of the job.
            load: returns the checked job for a number of processes.
        """
        return None
