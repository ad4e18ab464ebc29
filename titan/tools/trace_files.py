"""Files of the profiler's traces: profiling_hook.py writes them, trace.py analyses them."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan.base.run_folder import CONFIG, RunFolder
from titan.base.untrusted import InputError, Unpacked

from .trace import Record, TracedSteps, analyse

# Bytes read at once; characters of one event, beyond which a file is no trace.
_BLOCK_BYTES, _MAX_EVENT_CHARS = 2**20, 2**22
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
_NEXT = re.compile(r"[\s,]*([^\s,])")
# Errors of json and arithmetic for values that a profiler does not write.
ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_FILE = re.compile(r"step-(\d+)/rank-(\d+)\.json\.gz$")


def find_traces(run: Path, *, step: int | None, rank: int | None) -> list[Path]:
    """Find the traces of a step.

    Args:
        run: run folder, folder of traces, or a trace file.
        step: number of the step; None: the newest.
        rank: rank whose trace comes first; None: the lowest.

    Returns:
        The rank's trace, then the traces of the same step's other ranks.

    Raises:
        InputError: there is no such run, step or rank.
    """
    if run.is_file():
        return [run]
    if not run.exists():
        raise InputError(f"{run}: no such run{RunFolder.near(run, CONFIG)}")
    by_step = defaultdict(dict)
    # In the folder of traces, or in the run above it.
    for path in (*run.glob("step-*/rank-*.json.gz"), *run.glob("*/step-*/rank-*.json.gz")):
        if match := _FILE.search(path.as_posix()):
            by_step[int(match[1])][int(match[2])] = path
    if not by_step:
        raise InputError(
            f"{run}: no traces; train with profiling.enable_profiling = true, for profiling.profile_freq steps at least"
        )
    step = _chosen(by_step, step, f"{run}: no trace of step", max)
    ranks = by_step[step]
    rank = _chosen(ranks, rank, f"{run}: no trace of rank", min)
    # The requested rank comes first: its tables are printed.
    return [ranks.pop(rank), *(ranks[other] for other in sorted(ranks))]


def _chosen(found: dict[int, Any], number: int | None, missing: str, default: Any) -> int:
    """Return the number, or the default one of those found."""
    number = default(found) if number is None else number
    if number not in found:
        some = ", ".join(map(str, sorted(found)[:10]))
        raise InputError(f"{missing} {number}; there are {some}")
    return number


def read_trace(path: Path) -> TracedSteps:
    """Read a trace file, event by event.

    Raises:
        InputError: the file is not a whole trace.
    """
    try:
        with Unpacked(path) as file:
            return analyse(events_of(file))
    except (EOFError, OSError, zlib.error, *ODD) as error:
        advice = "a run that is killed leaves such: take another --step or --rank"
        raise InputError(f"{path}: not a whole trace ({error!r:.200}); {advice}") from None


def events_of(file: Unpacked) -> Iterator[Record]:
    """Yield the events of a trace in Chrome's format.

    Raises:
        ValueError: the file ends before its events do.
    """
    decode = json.JSONDecoder().raw_decode
    incremental = codecs.getincrementaldecoder("utf-8")("replace")

    def longer(text: str, missing: str) -> str:
        block = file.read(_BLOCK_BYTES)
        if not block or len(text) > _MAX_EVENT_CHARS:
            raise ValueError(f"no {missing}")
        return text + incremental.decode(block)

    text = ""
    while (begin := _BEGIN.search(text)) is None:
        text = longer(text, "traceEvents")
    at = begin.end()
    while (start := _NEXT.match(text, at)) is None or start[1] != "]":
        try:
            event, at = decode(text, start.start(1) if start else len(text))
        except ValueError:  # it goes on in the next block
            text, at = longer(text[at:], "end of its events"), 0
            continue
        if isinstance(event, dict):
            yield event
