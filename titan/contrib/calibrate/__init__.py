"""A profile of this machine, or from a profiler's trace: the options --calibrate and --calibrate-from of `titan sim`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from titan.sim.extension import SimExtension
from titan.sim.report.text import require_no_job, require_writable, say


class CalibrateTrace(SimExtension):
    """Options --calibrate FILE and --calibrate-from TRACE of `titan sim`."""

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--calibrate",
            type=Path,
            metavar="FILE",
            help="measure this machine instead, and write a profile; --hardware is then what it is compared with, and no job is needed",
        )
        parser.add_argument(
            "--calibrate-from",
            type=Path,
            metavar="TRACE",
            help="correct a profile by a trace of torch's profiler of any job instead; --calibrate names the file",
        )

    def run(self, options: Namespace, job: Sequence[str]) -> int | None:
        trace, target = options.calibrate_from, options.calibrate
        require_writable(options, "calibrate")
        if trace is None:
            if target is None:
                return None
            require_no_job(job, "--calibrate")
            from titan.contrib.calibrate.device import calibrate  # imports torch

            return calibrate(target, base_name=options.hardware, say=say)
        require_no_job(job, "--calibrate-from")
        from .from_trace import calibrate_from

        return calibrate_from(trace, base_name=options.hardware, target=target)
