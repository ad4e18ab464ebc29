"""Extensions of `titan sim` by other packages. Imports no torch.

A package registers its subclass under the entry point group `titan.extensions` as sim.NAME
(titan/config/plug_ins.py).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from titan.config.plug_ins import load_plug_ins

if TYPE_CHECKING:
    from titan.config.schema import JobConfig

    from .simulate import Facts, Simulation, StepSimulation


class SimExtension:
    """Options, facts and files that a package adds to a simulation.

    A subclass overrides the methods that it needs.

    Attributes:
        files: Names of its options that are paths of its output files, such as "trace" of --trace.
    """

    files: tuple[str, ...] = ()

    def add_options(self, parser: ArgumentParser) -> None:
        """Add options to the command."""

    def check(self, options: Namespace, config: JobConfig) -> None:
        """Raise `ConfigError` for options that do not go with the job."""

    def facts(self, simulation: Simulation, **how: Any) -> Facts:
        """Return more facts of a job's first phase, for --json and the page; `how` as for `simulate`."""
        return {}

    def lines(self, facts: Facts) -> Iterable[str]:
        """Return more lines of the page."""
        return ()

    def write(self, simulation: StepSimulation, options: Namespace) -> None:
        """Write the files that the options name. May raise OSError."""


def sim_extensions() -> list[SimExtension]:
    """Return an instance of each extension that is installed."""
    return [extension() for extension in load_plug_ins("titan.extensions", of="sim")]
