"""What a run folder holds about how its run went: read once, leniently, since a run that has failed leaves half-written files."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from titan.health.run_lock import NAME, LockHolder, started
from titan.health.stacks import stacks_file
from titan.observe.runinfo import Status, load_status
from titan.untrusted import (
    Count,
    Finite,
    InputError,
    Rank,
    parse_json,
    read_json,
    tail_lines,
)

_ERROR = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (?:ERROR|CRITICAL) +[\w.]+: (.*)$")
_TITLE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
# Signals of a fault in native code, and how faulthandler names them.
_FATAL = {
    "Fatal Python error: Segmentation fault": signal.SIGSEGV,
    "Fatal Python error: Bus error": signal.SIGBUS,
    "Fatal Python error: Floating-point exception": signal.SIGFPE,
    "Fatal Python error: Illegal instruction": signal.SIGILL,
}
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OURS = re.compile(r"(?:^|/)((?:titan|models)/[\w/]+\.py)$")
_FRESH_S = 60  # of a lease whose owner is on another machine
_MAX_ENTRIES = 60_000  # of all flight recorders together: what counts is at their ends
_DUMP_BYTES = 8 * 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A collective, as a flight recorder has it."""

    group: str
    backend: str
    seq: Count
    p2p_seq: Count
    operation: str
    called: str
    line: str
    input_sizes: list[list[Count]]
    input_dtypes: list[str]
    enqueued_unix_s: Finite | None


@dataclass(frozen=True)
class Message:
    """A send or receive."""

    peer: Rank
    sends: bool
    seq: Count
    axis: str
    size: list[Count]
    dtype: str
    line: str
    enqueued_unix_s: Finite


@dataclass(frozen=True)
class Group:
    """A process group. begun: how many collectives, by backend."""

    axis: str
    begun: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class MainThread:
    """What it does; and whether it waits, for others or for the device."""

    text: str
    waits: bool


@dataclass(frozen=True)
class Dump:
    """One rank's flight recorder; titan/health/flight_recorder.py says what is in it."""

    rank: Rank
    host: str
    reason: str
    step: Count
    unix_s: Finite
    main_thread: MainThread
    world_size: Rank
    oom_kills: Count
    groups: dict[str, Group] = field(repr=False)
    entries: list[Call] = field(repr=False)
    p2p: list[Message] = field(repr=False)

    @property
    def doing(self) -> str:
        return self.main_thread.text

    @property
    def waits(self) -> bool:
        return self.main_thread.waits

    @property
    def idle_s(self) -> float | None:
        """Since the last collective, send or receive was begun."""
        times = [row[-1].enqueued_unix_s or 0 for row in (self.entries, self.p2p) if row]
        return self.unix_s - max(times) if times else None


@dataclass(frozen=True)
class Environment:
    """environment.json, as far as it is read."""

    written_unix_s: Finite = 0.0
    world_size: Rank = 1


@dataclass(frozen=True)
class Exit:
    exit_code: Annotated[int, Field(ge=-255, le=255)]
    unix_s: Finite


@dataclass(frozen=True)
class Launch:
    """logs/launch-*.json."""

    ranks: dict[str, Exit]
    oom_kills: Count


@dataclass(frozen=True)
class Row:
    """A row of metrics.jsonl."""

    step: Count
    step_s: Finite = 0.0


@dataclass(frozen=True)
class Times:
    """A row of a rank's own times."""

    step: Count
    step_s: Finite
    data_wait_s: Finite
    unix_s: Finite
    own_s: Finite | None = None


@dataclass
class Evidence:
    """Everything that is known; ranks that said nothing are missing from the tables by rank.

    damaged: why a file cannot be used, or rows of it, as far as files have been read.
    """

    run_dir: Path
    damaged: dict[str, str] = field(default_factory=dict)

    def _try(self, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except InputError as error:
            file, _, why = str(error).removeprefix(f"{self.run_dir}/").partition(": ")
            self.damaged.setdefault(file, f"{file}: {why}")
            return default

    def _json(self, path: Path, kind: type[T], default: T, *, limit: int = 2**20) -> T:
        """What a file holds; `default` where there is none, or it is damaged."""
        if not path.is_symlink() and not path.exists():
            return default
        return self._try(lambda: read_json(path, kind, limit=limit, within=path.parent), default)

    def _lines(self, path: Path) -> list[str]:
        if not path.is_symlink() and not path.exists():
            return []
        return self._try(lambda: tail_lines(path, within=path.parent), [])

    def _rows(self, path: Path, kind: type[T], num: int) -> list[T]:
        """The newest whole rows. The last line may be torn, by a kill."""
        *lines, torn = self._lines(path) or [""]
        found = [self._try(lambda x=x: [parse_json(x, kind, name=path)], []) for x in lines[-num:]]
        if torn and any(found):
            with suppress(InputError):
                found.append([parse_json(torn, kind, name=path)])
        elif torn:  # there is nothing else
            found.append(self._try(lambda: [parse_json(torn, kind, name=path)], []))
        return [row for rows in found for row in rows]

    @cached_property
    def status(self) -> Status:
        return self._try(lambda: load_status(self.run_dir), Status())

    @property
    def state(self) -> str:
        return self.status.state

    @property
    def reason(self) -> str:
        return self.status.reason

    @cached_property
    def environment(self) -> Environment:
        return self._json(self.run_dir / "environment.json", Environment, Environment())

    @property
    def began_unix_s(self) -> float:
        return self.environment.written_unix_s

    @cached_property
    def dumps(self) -> dict[int, Dump]:
        """Of the run that wrote last: an older one may have had more ranks."""
        # Named by rank. Other files of that kind in the folder are no concern of ours.
        paths = [
            path
            for path in sorted(self.run_dir.glob("*/*.json"))
            if re.search(r"\d\.json$", path.name) and not path.name.startswith("launch-")
        ]
        dumps, keep = [], max(_MAX_ENTRIES // max(len(paths), 1), 20)
        for path in paths:
            if dump := self._json(path, Dump, None, limit=_DUMP_BYTES):  # pyright: ignore
                del dump.entries[:-keep], dump.p2p[:-keep]
                dumps.append(dump)
        if not dumps:
            return {}
        newest = max(dumps, key=lambda dump: dump.unix_s)
        return {dump.rank: dump for dump in dumps if dump.rank < newest.world_size}

    @property
    def world_size(self) -> int:
        sizes = [dump.world_size for dump in self.dumps.values()]
        return max(sizes, default=self.environment.world_size)

    @cached_property
    def errors(self) -> dict[int, str]:
        """The last error in each rank's log, of this run."""
        found = {}
        for rank, path in self._of_ranks("log"):
            for line in self._lines(path):
                match = _ERROR.match(line)
                if match and _local_time(match[1]) >= self.began_unix_s - 1:
                    found[rank] = match[2]
        return found

    @cached_property
    def exits(self) -> dict[int, int]:
        """Exit codes of ranks, as the launcher saw them; below 0: the signal."""
        return {
            int(rank): failure.exit_code
            for launch in self._launches
            for rank, failure in launch.ranks.items()
            if failure.unix_s >= int(self.began_unix_s) and re.fullmatch(r"\d{1,6}", rank)
        }

    @cached_property
    def fatal(self) -> dict[int, signal.Signals]:
        """Ranks that died of a fault in native code: as the launcher saw it, or as their stacks begin."""
        found = {
            r: signal.Signals(-code) for r, code in self.exits.items() if -code in _FATAL.values()
        }
        for rank, path in self._of_ranks("stacks.txt"):
            with suppress(OSError):
                if path.stat().st_mtime < self.began_unix_s:
                    continue
            # A process that has died of it writes nothing after it.
            for line in reversed(self._lines(path)):
                if _TITLE.match(line):
                    break
                if line in _FATAL:
                    found[rank] = _FATAL[line]
        return found

    @property
    def num_oom_kills(self) -> int:
        """Processes that the kernel has killed in the cgroup of the run."""
        seen = [launch.oom_kills for launch in self._launches]
        return max([*seen, *(dump.oom_kills for dump in self.dumps.values())], default=0)

    @cached_property
    def _launches(self) -> list[Launch]:
        paths = sorted(self.run_dir.glob("logs/launch-*.json"))
        found = [self._json(path, Launch, None) for path in paths]  # pyright: ignore
        return [launch for launch in found if launch]

    @cached_property
    def metrics(self) -> list[Row]:
        return self._rows(self.run_dir / "metrics.jsonl", Row, 100)

    @cached_property
    def times(self) -> dict[int, list[Times]]:
        """Newest rows of each rank's own times."""
        return {
            rank: [
                row for row in self._rows(path, Times, 20) if row.unix_s >= self.began_unix_s - 60
            ]
            for rank, path in self._of_ranks("times.jsonl")
        }

    def _of_ranks(self, ending: str) -> list[tuple[int, Path]]:
        """The ranks' files of a kind in logs/, by rank."""
        matches = [
            (re.fullmatch(rf"rank-(\d{{1,6}})\.{re.escape(ending)}", path.name), path)
            for path in self.run_dir.glob(f"logs/rank-*.{ending}")
        ]
        return sorted((int(match[1]), path) for match, path in matches if match)

    @cached_property
    def owner(self) -> LockHolder | None:
        """The process that holds the run folder, if it lives."""
        path = self.run_dir / NAME
        owner = self._json(path, LockHolder, None)  # pyright: ignore[reportArgumentType]
        if owner is None:
            return None
        if owner.machine == LockHolder.this_process().machine != "":
            return owner if started(str(owner.pid)) == owner.started else None
        with suppress(OSError):
            return owner if time.time() - path.stat().st_mtime < _FRESH_S else None
        return None

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.run_dir).free

    def stack(self, rank: int) -> str:
        """Where the main thread of a rank was, by its last stacks; empty where there are none."""
        threads: list[list[str]] = []
        for line in self._lines(stacks_file(self.run_dir, rank)):
            if line.startswith(("Thread 0x", "Current thread 0x")):
                threads.append([])
            elif threads and (frame := _FRAME.match(line)):
                threads[-1].append(f"{_short(frame[1])}:{frame[2]}, in {frame[3]}")
        frames = threads[-1] if threads else []  # the main thread is written last
        ours = [frame for frame in frames if frame.startswith(("titan/", "models/"))]
        return " <- ".join(dict.fromkeys([*frames[:1], *ours[:1]]))


def _short(file: str) -> str:
    match = _OURS.search(file)
    return match[1] if match and "site-packages" not in file else "/".join(file.split("/")[-2:])


def _local_time(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):  # no such day
        return 0.0
