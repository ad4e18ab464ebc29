"""Files of the profiler's traces: profiler.py writes them, trace.py analyses them."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from titan.base.run_folder import CONFIG, RunFolder
from titan.base.untrusted import InputError, Unpacked

from .trace import MAX_EVENTS, Record, Report, TooLarge, analyse

# Bytes read at once; characters of one event, beyond which a file is no trace.
_BLOCK_BYTES, _MAX_EVENT_CHARS = 2**20, 2**22
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT = re.compile(r"[\s,]*([^\s,])")
# Errors of json and arithmetic for values that a profiler does not write.
_ODD = (AttributeError, RecursionError, IndexError, OverflowError, ZeroDivisionError)
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
    by_step = defaultdict[int, dict[int, Path]](dict)
    for folder in ("", "*/"):  # the folder of traces itself, or the run above it
        for path in run.glob(f"{folder}step-*/rank-*.json.gz"):
            if match := _FILE.search(path.as_posix()):
                by_step[int(match[1])][int(match[2])] = path
    if not by_step:
        raise InputError(
            f"{run}: no traces; train with profiling.enable_profiling = true, for profiling.profile_freq steps at least"
        )
    step = max(by_step) if step is None else step
    if step not in by_step:
        raise InputError(f"{run}: no trace of step {step}; there are {_some(by_step)}")
    ranks = by_step[step]
    rank = min(ranks) if rank is None else rank
    if rank not in ranks:
        raise InputError(
            f"{run}: no trace of rank {rank} at step {step}; there are {_some(ranks)}"
        )
    # The requested rank comes first: its tables are printed.
    return [ranks.pop(rank), *(ranks[other] for other in sorted(ranks))]


def measured_parts(run: Path) -> tuple[int, dict[str, float]] | None:
    """Return the rank of a run's last trace and the seconds of each of PARTS in a step, or None without a trace."""
    try:
        path, *_ = find_traces(run, step=None, rank=None)
        return int(re.findall(r"\d+", path.name)[0]), read_report(path).parts_s
    except InputError:
        return None


def _some(numbers: Iterable[int]) -> str:
    first = sorted(numbers)
    return ", ".join(map(str, first[:10])) + (" ..." if len(first) > 10 else "")


def read_report(path: Path) -> Report:
    """Read the report of a trace file, event by event.

    Raises:
        InputError: the file is not a whole trace.
    """
    advice = "a run that is killed leaves such: take another --step or --rank"
    try:
        with Unpacked(path) as file:
            return analyse(events_of(file))
    except TooLarge:
        advice = "record fewer steps: profiling.profiler_active"
        raise InputError(f"{path}: more than {MAX_EVENTS:,} events; {advice}") from None
    except (EOFError, OSError, zlib.error, ValueError, KeyError, TypeError, *_ODD) as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
        raise InputError(f"{path}: not a whole trace ({reason}); {advice}") from None


def events_of(file: Unpacked) -> Iterator[Record]:
    """Yield the events of a trace in Chrome's format.

    Raises:
        ValueError: the file ends before its events do.
    """
    decode = json.JSONDecoder().raw_decode
    text, at, is_within = "", 0, False
    incremental = codecs.getincrementaldecoder("utf-8")("replace")
    while block := file.read(_BLOCK_BYTES):
        # The rest of the last block begins this block.
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
