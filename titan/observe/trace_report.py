"""Run `titan profile RUN [--step N] [--rank R] [--json]`: show where a training step's time went,
as two tables.

It finds the trace that profiler.py wrote, has trace.py read it, and prints. Of a step's other ranks it says only how far apart
they are.
"""

from __future__ import annotations

import argparse
import codecs
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan.observe.trace import MAX_EVENTS, PHASES, Report, TooLarge, analyse
from titan.observe.trace_kinds import COMMUNICATION, HOST, PARTS
from titan.untrusted import Unpacked

_MAX_RANKS = 8  # that are read: a large trace takes seconds
# Bytes read at once; characters of one event, beyond which a file is no trace.
_BLOCK_BYTES, _MAX_EVENT_CHARS = 2**20, 2**22
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(r"[\s,]*([^\s,])")
# What json and the arithmetic raise for values that a profiler does not write.
_ODD = (AttributeError, RecursionError, IndexError, OverflowError, ZeroDivisionError)
_FILE = re.compile(r"step-(\d+)/rank-(\d+)\.json\.gz$")


class TraceFileError(Exception):
    """Report what the user did wrong, in a line."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code, 2 for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="titan profile", description="Where a step's time went, from a trace of a run."
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="run folder, folder of traces, or one trace")
    add("--step", type=int, metavar="N", help="default: the last one traced")
    add("--rank", type=int, metavar="R", help="default: the first one traced")
    add("--json", action="store_true", help="the answer as JSON, each block by itself")
    arguments = parser.parse_args(argv)
    try:
        paths = find_traces(arguments.run, step=arguments.step, rank=arguments.rank)
        reports = [read_report(path) for path in paths[:_MAX_RANKS]]
    except (TraceFileError, OSError) as error:
        print(f"titan profile: {error}", file=sys.stderr)
        return 2
    ranks = {
        path.name.split(".")[0]: {
            "step_s": report.step_s,
            "exposed_s": report.parts_s[COMMUNICATION],
            "idle_s": report.parts_s[HOST],
        }
        for path, report in zip(paths, reports, strict=False)
    }
    if arguments.json:
        answer = {"trace": str(paths[0]), **asdict(reports[0]), "ranks": ranks}
        print(json.dumps(answer, indent=1))
    else:
        lines = [str(paths[0]), *_parts(reports[0]), "", *_modules(reports[0])]
        print("\n".join(lines + (_spread(ranks, len(paths)) if len(paths) > 1 else [])))
    return 0


def find_traces(run: Path, *, step: int | None, rank: int | None) -> list[Path]:
    """Return the trace that was asked for, then those of the same step's other ranks."""
    if run.is_file():
        return [run]
    if not run.exists():
        near = sorted(str(path.parent) for path in run.parent.glob("*/config.toml"))[:5]
        raise TraceFileError(
            f"{run}: no such run" + (f"; runs near it: {', '.join(near)}" if near else "")
        )
    by_step: defaultdict[int, dict[int, Path]] = defaultdict(dict)
    for folder in ("", "*/"):  # the folder of traces itself, or the run above it
        for path in run.glob(f"{folder}step-*/rank-*.json.gz"):
            if match := _FILE.search(path.as_posix()):
                by_step[int(match[1])][int(match[2])] = path
    if not by_step:
        raise TraceFileError(
            f"{run}: no traces; train with profiling.enable_profiling = true, for profiling.profile_freq steps at least"
        )
    step = max(by_step) if step is None else step
    if step not in by_step:
        raise TraceFileError(f"{run}: no trace of step {step}; there are {_some(by_step)}")
    ranks = by_step[step]
    rank = min(ranks) if rank is None else rank
    if rank not in ranks:
        raise TraceFileError(
            f"{run}: no trace of rank {rank} at step {step}; there are {_some(ranks)}"
        )
    # The one asked for comes first: its tables are printed.
    return [ranks.pop(rank), *(ranks[other] for other in sorted(ranks))]


def _some(numbers: Iterable[int]) -> str:
    first = sorted(numbers)
    return ", ".join(map(str, first[:10])) + (" ..." if len(first) > 10 else "")


def read_report(path: Path) -> Report:
    """Return the report of a trace file, which is read event by event. Raises TraceFileError where it is not a whole trace."""
    advice = "a run that is killed leaves such: take another --step or --rank"
    try:
        with Unpacked(path) as file:
            return analyse(_events(file))
    except TooLarge:
        advice = "record fewer steps: profiling.profiler_active"
        raise TraceFileError(f"{path}: more than {MAX_EVENTS:,} events; {advice}") from None
    except (EOFError, OSError, zlib.error, ValueError, KeyError, TypeError, *_ODD) as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
        raise TraceFileError(f"{path}: not a whole trace ({reason}); {advice}") from None


def _events(file: Unpacked) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace in chrome's format. Raises ValueError where it ends before they do."""
    decode = json.JSONDecoder().raw_decode
    text, at, is_within = "", 0, False
    incremental = codecs.getincrementaldecoder("utf-8")("replace")
    while block := file.read(_BLOCK_BYTES):
        # What the last block left over begins this one.
        text, at = text[at:] + incremental.decode(block), 0
        if not is_within:
            begin = _BEGIN.search(text)
            # Keep enough of the end for a key that the blocks' border cuts in two.
            if begin is None:
                at = max(len(text) - 64, 0)
                continue
            is_within, at = True, begin.end()
        while (start := _NEXT.match(text, at)) is not None:
            if start[1] == "]":
                return
            try:
                event, at = decode(text, start.start(1))
            except ValueError:
                break  # it goes on in the next block
            if isinstance(event, dict):
                yield event
        if len(text) - at > _MAX_EVENT_CHARS:
            raise ValueError("no event where one should be")
    raise ValueError("no end of its events" if is_within else "no traceEvents")


def _parts(report: Report) -> list[str]:
    what = {"gpu": "kernels on the GPU's streams", "cpu": "CPU: self times of operators on threads"}
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


def _modules(report: Report) -> list[str]:
    """Return the table of modules. Blocks are added up: layers.0.attention and layers.1.attention
    are "layers.*.attention (2)"."""
    groups: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for name, row in report.modules_s.items():
        groups[re.sub(r"\.\d+", ".*", name)].append(row)
    phases = [p for p in PHASES if any(row[p] for row in report.modules_s.values())]
    lines = [f"{'module':<32}{''.join(f'{p:>11}' for p in phases)}{'total':>11}{'share':>8}"]
    for name, rows in groups.items():
        label = f"{name} ({len(rows)})" if "*" in name else name
        sums: dict[str, Any] = {key: sum(row[key] for row in rows) for key in rows[0]}
        cells = "".join(f"{_ms(sums[p]) if sums[p] else '':>11}" for p in phases)
        lines.append(f"{label[:31]:<32}{cells} {_with_share(sums['total'], report)}")
    return lines


def _spread(ranks: dict[str, dict[str, float]], num_ranks: int) -> list[str]:
    """Return least and most over the ranks, in ms, and the rank for which the others are likely to
    wait."""

    def span(key: str) -> str:
        values_ms = [row[key] * 1e3 for row in ranks.values()]
        return "-".join(f"{x:,.{2 if x < 100 else 0}f}" for x in (min(values_ms), max(values_ms)))

    # Whoever waits least for others, or for its host, is the one that others wait for.
    least = min(ranks, key=lambda rank: ranks[rank]["exposed_s"] + ranks[rank]["idle_s"])
    spans = f"step {span('step_s')}, exposed {span('exposed_s')}, idle {span('idle_s')}"
    return ["", f"{len(ranks)} of {num_ranks:,} ranks, ms: {spans}; waits least: {least}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _with_share(seconds: float, report: Report) -> str:
    return f"{_ms(seconds):>10}{seconds / report.step_s:>8.1%}"


if __name__ == "__main__":
    sys.exit(main())
