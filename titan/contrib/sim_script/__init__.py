"""Simulation of a training step of the user's own: the option --script of `titan sim`."""

from __future__ import annotations

import ast
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.config.options import mistake
from titan.sim.extension import SimExtension
from titan.sim.price.profiles import load_profile

if TYPE_CHECKING:
    from titan.sim.simulate import Facts, StepSimulation


class SimScript(SimExtension):
    """Option --script FILE.py:BUILD of `titan sim`."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--script",
            metavar="FILE.py:BUILD",
            help="in place of a job: a training step of your own, with --KEY=VALUE for the function's arguments",
        )

    def run(self, options: Namespace, job: Sequence[str]) -> int | None:
        """Simulate the script's step, and return the exit code. The other arguments are those of its function."""
        if not options.script:
            return None
        if options.world_size is None or options.hardware is None:
            raise mistake("--script", "needs --world-size and --hardware")
        for name in ("sweep", "measured", "whole", "no_cache", "run", "phase"):
            if getattr(options, name):
                raise mistake(f"--{name.replace('_', '-')}", "is for a job, not for a script")
        profile = load_profile(options.hardware)
        file, colon, _ = options.script.rpartition(":")
        if not colon or not Path(file).is_file():
            message = f"'{options.script}': expected FILE.py:FUNCTION of a file that is there"
            raise mistake("--script", message)
        arguments = _arguments(job)
        arguments |= {"world_size": options.world_size, "processes": options.processes}

        # These import torch, so mistakes are reported before.
        from titan.sim.cli import show

        from .simulated import script_facts, simulate_step

        def run_script() -> tuple[StepSimulation, Facts, str]:
            simulation = simulate_step(options.script, profile=profile, **arguments)
            return simulation, script_facts(simulation, Path(file).name), ""

        return show(options, run_script)


def _arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return arguments --KEY=VALUE of a script's function. A value that is no Python literal is a text."""
    arguments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not equals:
            raise mistake(text, "expected --KEY=VALUE, an argument of the script's function")
        arguments[key] = value
        with suppress(SyntaxError, ValueError):
            arguments[key] = ast.literal_eval(value)
    return arguments
