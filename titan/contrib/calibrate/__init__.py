"""A profile from a profiler's trace: the option --calibrate-from of `titan sim`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from titan.config.options import mistake
from titan.sim.extension import SimExtension
from titan.sim.report.text import require_writable


class CalibrateTrace(SimExtension):
    """Option --calibrate-from TRACE of `titan sim`, and --calibrate FILE for the profile's name."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--calibrate-from",
            type=Path,
            metavar="TRACE",
            help="correct a profile by a trace of torch's profiler of any job instead; --calibrate names the file",
        )
        parser.add_argument(
            "--calibrate",
            type=Path,
            metavar="FILE",
            help="profile that --calibrate-from writes",
        )

    def run(self, options: Namespace, job: Sequence[str]) -> int | None:
        trace, target = options.calibrate_from, options.calibrate
        require_writable(options, "calibrate")
        if trace is None:
            if target is not None:
                text = "needs --calibrate-from TRACE: kernels measured alone made a profile worse than the steps of a trace do"
                raise mistake("--calibrate", text)
            return None
        if job:
            raise mistake(job[0], "is no option, and --calibrate-from needs no job")
        from .from_trace import calibrate_from

        return calibrate_from(trace, base_name=options.hardware, target=target)
