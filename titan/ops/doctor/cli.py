"""Command `titan doctor RUN_DIR [--json]`: the diagnosis of a run, with advice.

Exit codes: 0 the run is well: it runs, is done, or was stopped; 1 a fault was found; 2 there is no
run in that folder.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from titan.base.run_folder import STATUS, RunFolder
from titan.base.untrusted import printable
from titan.config.options import command_parser, put_json

from .diagnosis import Diagnosis, diagnose
from .evidence import Evidence

_MAX_LINE = 2000  # characters of a cause, or a piece of evidence


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    about = "What happened to a run: which rank, which collective, which line, what to do. Exit code 1: a fault was found."
    parser = command_parser("doctor", summary=about)
    parser.add_argument(
        "run", metavar="RUN_DIR", type=Path, help="a run folder (job.dump_folder)"
    )
    parser.add_json()
    options = parser.parse_args(argv)
    runs = RunFolder.find([options.run])
    if not (runs[0] / STATUS).is_file():
        what = "there is no such folder"
        if options.run.is_dir():
            what = "holds no run (no status.json)"
        print(f"{options.run}: {what}; give the job.dump_folder of a run", file=sys.stderr)
        return 2
    # Reading and judging write nothing, so this may run beside a live run.
    diagnoses = {run: diagnose(Evidence(run)) for run in runs}
    pages = [
        asdict(diagnosis)
        | {
            "run": str(run),
            "findings": [
                asdict(finding) | {"advice": finding.advice} for finding in diagnosis.findings
            ],
        }
        for run, diagnosis in diagnoses.items()
    ]
    if not put_json(pages if len(pages) > 1 else pages[0], options.json):
        print("\n\n".join(_page(run, diagnosis) for run, diagnosis in diagnoses.items()))
    return int(any(diagnosis.findings for diagnosis in diagnoses.values()))


def _page(run: Path, diagnosis: Diagnosis) -> str:
    lines = [f"{run}: {diagnosis.summary}"]
    lines += [
        f"steps up to {event['step']:,} are those of {event.get('run')} (titan swap)"
        for event in RunFolder(run).events()
        if event["event"] == "swap"
    ]
    if not diagnosis.findings:
        lines.append("nothing is wrong")
    for number, finding in enumerate(diagnosis.findings):
        lines += ["", "most likely" if number == 0 else "also"]
        lines += _wrap(finding.cause)
        lines += [line for text in finding.evidence for line in _wrap(text, "  - ")]
        lines += _wrap(f"what to do: {finding.advice}")
    return "\n".join(map(printable, lines))


def _wrap(text: str, begin: str = "  ") -> list[str]:
    return textwrap.wrap(
        printable(text, _MAX_LINE),  # the files may hold anything
        width=110,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,  # paths are copied from here
        break_on_hyphens=False,
    )
