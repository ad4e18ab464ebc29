"""Base class of packages' additions to `titan sim`. Imports no torch.

A package registers its subclass under the entry point group `titan.extensions` as sim.NAME
(titan/config/plug_ins.py).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from titan.config.plug_ins import door, parts_of

if TYPE_CHECKING:
    from titan.config.schema import JobConfig

    from .simulate import Facts, Simulation, StepSimulation


@door("sim")
class SimExtension:
    """Additional options, facts and files of a simulation. A subclass overrides the methods that it needs.

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

    def check(self, options: Namespace, config: JobConfig) -> None:
        """Check the options against the job.

        Args:
            options: parsed options of the command.
            config: the job.

        Raises:
            ConfigError: an option does not go with the job.
        """

    def facts(self, simulation: Simulation, **how: Any) -> Facts:
        """Return additional facts of a job's first phase, for --json and the page.

        Args:
            simulation: the simulated job.
            **how: arguments of `simulate`.
        """
        return {}

    def forward_tokens(self, simulation: Simulation) -> int:
        """Return the tokens of each rank's forward passes beside training, over a phase of the run."""
        return 0

    def lines(self, facts: Facts) -> Iterable[str]:
        """Return additional lines of the page."""
        return ()

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
