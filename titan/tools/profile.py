"""Command `titan profile RUN [--step N] [--rank R] [--json]`: the time of a training step, as two tables.

trace_files.py reads the trace. The command prints the report, and how far apart the step's
ranks are.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titan.base.untrusted import InputError
from titan.config.options import put_json
from titan.observe.step_parts import COMMUNICATION, HOST, PARTS

from .tables import parser_of
from .trace import PHASES, Report
from .trace_files import find_traces, read_report

_MAX_RANKS = 8  # ranks to read: a large trace takes seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code, 2 for the user's mistakes."""
    parser = parser_of("profile")
    parser.add_json()
    arguments = parser.parse_args(argv)
    try:
        paths = find_traces(arguments.run, step=arguments.step, rank=arguments.rank)
    except OSError as error:
        raise InputError(str(error)) from None
    reports = [read_report(path) for path in paths[:_MAX_RANKS]]
    ranks = {
        path.name.split(".")[0]: {
            "step_s": report.step_s,
            "exposed_s": report.parts_s[COMMUNICATION],
            "idle_s": report.parts_s[HOST],
        }
        for path, report in zip(paths, reports, strict=False)
    }
    answer = {"trace": str(paths[0]), **asdict(reports[0]), "ranks": ranks}
    if not put_json(answer, arguments.json):
        lines = [str(paths[0]), *_parts(reports[0]), "", *_modules(reports[0])]
        print("\n".join(lines + (_spread(ranks, len(paths)) if len(paths) > 1 else [])))
    return 0


def _parts(report: Report) -> list[str]:
    what = {
        "gpu": "kernels on the GPU's streams",
        "cpu": "CPU: self times of operators on threads",
    }
    steps = "1 step" if report.num_steps == 1 else f"mean of {report.num_steps} steps"
    return [
        f"{steps}, {_ms(report.step_s)} ms; {what[report.device]}",
        "",
        f"{'part':<42}{'ms':>10}{'share':>8}{'calls':>9}",
        *(
            f"{PARTS[part]:<42}{_with_share(seconds, report)}{report.calls.get(part, 0):>9,.0f}"
            for part, seconds in report.parts_s.items()
        ),
        f"{'step':<42}{_with_share(report.step_s, report)}",
        f"{'communication behind work, not in the sum':<42}{_ms(report.communication_hidden_s):>10}",
    ]


def _modules(report: Report) -> Iterator[str]:
    """Return the table of modules.

    Blocks are added up: layers.0.attention and layers.1.attention are "layers.*.attention (2)".
    """
    groups = defaultdict[str, list[dict[str, float]]](list)
    for name, row in report.modules_s.items():
        groups[re.sub(r"\.\d+", ".*", name)].append(row)
    phases = [p for p in PHASES if any(row[p] for row in report.modules_s.values())]
    yield f"{'module':<32}{''.join(f'{p:>11}' for p in phases)}{'total':>11}{'share':>8}"
    for name, rows in groups.items():
        label = f"{name} ({len(rows)})" if "*" in name else name
        sums: dict[str, Any] = {key: sum(row[key] for row in rows) for key in rows[0]}
        cells = "".join(f"{_ms(sums[p]) if sums[p] else '':>11}" for p in phases)
        yield f"{label[:31]:<32}{cells} {_with_share(sums['total'], report)}"


def _spread(ranks: dict[str, dict[str, float]], num_ranks: int) -> list[str]:
    """Return minimum and maximum over the ranks, in ms, and the rank that the others probably wait for."""

    def span(key: str) -> str:
        values_ms = [row[key] * 1e3 for row in ranks.values()]
        return "-".join(
            f"{x:,.{2 if x < 100 else 0}f}" for x in (min(values_ms), max(values_ms))
        )

    # The rank that waits least for others, and for its host, is the rank that others wait for.
    least = min(ranks, key=lambda rank: ranks[rank]["exposed_s"] + ranks[rank]["idle_s"])
    spans = f"step {span('step_s')}, exposed {span('exposed_s')}, idle {span('idle_s')}"
    return ["", f"{len(ranks)} of {num_ranks:,} ranks, ms: {spans}; waits least: {least}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _with_share(seconds: float, report: Report) -> str:
    return f"{_ms(seconds):>10}{seconds / report.step_s:>8.1%}"


if __name__ == "__main__":
    sys.exit(main())
