"""A profile from a profiler's trace: the option --calibrate-from of `titan sim`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from titan.sim.extension import SimExtension


class CalibrateTrace(SimExtension):
    """Option --calibrate-from TRACE of `titan sim`."""

    def add_options(self, parser: ArgumentParser) -> None:
        help_text = "correct a profile by a trace of torch's profiler of any job instead; --calibrate names the file"
        parser.add_argument("--calibrate-from", type=Path, metavar="TRACE", help=help_text)

    def run(self, options: Namespace, job: Sequence[str]) -> int | None:
        if options.calibrate_from is None:
            return None
        from titan.sim.report.text import require_no_job

        from .calibrate import calibrate_from  # imports torch

        require_no_job(job, "--calibrate-from")
        trace, target = options.calibrate_from, options.calibrate
        return calibrate_from(trace, base_name=options.hardware, target=target)
