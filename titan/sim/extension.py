"""Base class of packages' additions to `titan sim`. Imports no torch.

A package registers its subclass under the entry point group `titan.extensions` as sim.NAME
(titan/config/plug_ins.py).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan.config.plug_ins import door, parts_of

if TYPE_CHECKING:
    from .simulate import StepSimulation


@door("sim")
class SimExtension:
    """Additional options and files of a simulation. A subclass overrides the methods that it needs.

    Attributes:
        files: names of the extension's options that are paths of written files, such as "trace" of
            --trace.
    """

    files: tuple[str, ...] = ()

    def add_options(self, parser: ArgumentParser) -> None:
        """Add options to the command."""

    def run(self, options: Namespace, job: Sequence[str]) -> int | None:
        """Run in place of a simulation, and return the exit code. None: the options ask for no such thing.

        Args:
            options: parsed options of the command.
            job: all other arguments: a job's files and keys, or misspelled options.

        Raises:
            ConfigError: an option is a mistake.
        """
        return None

    def write(self, simulation: StepSimulation, options: Namespace) -> None:
        """Write the files that the options name.

        Args:
            simulation: the simulated step.
            options: parsed options of the command.

        Raises:
            OSError: a file cannot be written.
        """


def sim_extensions() -> list[SimExtension]:
    """Return an instance of each installed extension."""
    return [*parts_of(SimExtension)]
