"""Chakra execution traces of a simulated step: the option --chakra of `titan sim`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from titan.sim.extension import SimExtension

if TYPE_CHECKING:
    from titan.sim.simulate import StepSimulation


class Chakra(SimExtension):
    """Option --chakra FOLDER of `titan sim`."""

    files = ("chakra",)

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--chakra",
            type=Path,
            metavar="FOLDER",
            help="execution traces of MLCommons' Chakra",
        )

    def write(self, simulation: StepSimulation, options: Namespace) -> None:
        if options.chakra:
            from .chakra import write_chakra  # imports torch

            write_chakra(simulation, options.chakra)
