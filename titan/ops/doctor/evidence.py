"""Evidence in a run folder about the course of its run.

It is read leniently, since a run that has failed leaves half-written files, and with care, since
anybody may have written them (titan/base/untrusted.py): a file that cannot be read counts as missing,
and is named in `damaged`.
"""

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

from titan.base.errors import Failure
from titan.base.run_folder import ENVIRONMENT, METRICS, RunFolder, Status
from titan.base.untrusted import (
    Count,
    Finite,
    InputError,
    Rank,
    is_there,
    parse_json,
    read_json,
    tail_lines,
)
from titan.ops.activity import Activity, stacks_file
from titan.ops.run_lock import LOCK_FILE, ProcessId

# Signals of a fault in native code, and how faulthandler names them.
_FATAL = {
    "Fatal Python error: Segmentation fault": signal.SIGSEGV,
    "Fatal Python error: Bus error": signal.SIGBUS,
    "Fatal Python error: Floating-point exception": signal.SIGFPE,
    "Fatal Python error: Illegal instruction": signal.SIGILL,
}
# Title after SIGABRT, which ends silent ranks. faulthandler may crash while it writes the stacks of running threads.
_ABORTED = "Fatal Python error: Aborted"
_TITLE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")  # of stacks that we asked for
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OURS = re.compile(r"(?:^|/)((?:titan|models)/[\w/]+\.py)$")
_FRESH_S = 60  # age of a lock whose holder on another machine is alive
_MAX_ENTRIES = 60_000  # of all flight recorders together: their last entries matter
_DUMP_BYTES = 8 * 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """Collective in a flight recorder.

    Attributes:
        group: name of the process group.
        backend: "gloo" or "nccl".
        seq: number of the collective in its group and backend.
        p2p_seq: number of the send or receive; 0 for a collective.
        operation: torch's name of the operation.
        called: function of torch.distributed that was called.
        line: source line of the call.
        input_sizes: shapes of the inputs.
        input_dtypes: dtypes of the inputs.
        enqueued_unix_s: time of the call.
    """

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
    """Send or receive in a flight recorder.

    Attributes:
        peer: rank at the other end.
        sends: whether it is a send.
        seq: number of the message for this peer and direction.
        axis: mesh axis of the group.
        size: shape of the tensor.
        dtype: dtype of the tensor.
        line: source line of the call.
        enqueued_unix_s: time of the call.
    """

    peer: Rank
    sends: bool
    seq: Count
    axis: str
    size: list[Count]
    dtype: str
    line: str
    enqueued_unix_s: Finite


@dataclass(frozen=True)
class GroupRecord:
    """Process group in a flight recorder.

    Attributes:
        axis: mesh axis of the group.
        begun: number of collectives that the rank has begun, by backend.
    """

    axis: str
    begun: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Dump:
    """Flight recorder of a rank. titan/ops/flight_recorder.py defines its content.

    Attributes:
        rank: the rank.
        host: its host.
        failure: reason for the dump.
        step: number of the step.
        unix_s: time of the dump.
        main_thread: activity of the main thread.
        world_size: number of ranks.
        oom_kills: processes that the kernel killed during the run.
        groups: process groups by name.
        entries: newest collectives.
        p2p: newest sends and receives of gloo.
    """

    rank: Rank
    host: str
    failure: Failure
    step: Count
    unix_s: Finite
    main_thread: Activity
    world_size: Rank
    oom_kills: Count
    groups: dict[str, GroupRecord] = field(repr=False)
    entries: list[Call] = field(repr=False)
    p2p: list[Message] = field(repr=False)

    @property
    def idle_s(self) -> float | None:
        """Return the seconds since the rank began its last collective, send or receive."""
        times = [row[-1].enqueued_unix_s or 0 for row in (self.entries, self.p2p) if row]
        return self.unix_s - max(times) if times else None


@dataclass(frozen=True)
class Environment:
    """Fields of environment.json that the doctor reads.

    Attributes:
        written_unix_s: start of the newest run.
        world_size: its number of ranks.
    """

    written_unix_s: Finite = 0.0
    world_size: Rank = 1


@dataclass(frozen=True)
class Exit:
    """End of a rank.

    Attributes:
        exit_code: exit code; below 0: the signal.
        unix_s: time of the end.
    """

    exit_code: Annotated[int, Field(ge=-255, le=255)]
    unix_s: Finite


@dataclass(frozen=True)
class LaunchRecord:
    """Content of logs/launch-*.json.

    Attributes:
        ranks: end of each rank, as the launcher saw it.
        oom_kills: processes that the kernel killed during the run.
    """

    ranks: dict[str, Exit]
    oom_kills: Count


@dataclass(frozen=True)
class LossRow:
    """Row of metrics.jsonl.

    Attributes:
        step: number of the step.
        step_s: seconds of a step.
    """

    step: Count
    step_s: Finite = 0.0


@dataclass(frozen=True)
class Times:
    """Row of a rank's own times, in seconds per step.

    Attributes:
        step: number of the step.
        step_s: time of a step.
        data_wait_s: wait for data.
        unix_s: time of the row.
        own_s: own time (titan/ops/ranks.py).
    """

    step: Count
    step_s: Finite
    data_wait_s: Finite
    unix_s: Finite
    own_s: Finite | None = None


@dataclass
class Evidence:
    """All evidence of a run. Ranks that left nothing are missing from the tables by rank.

    Attributes:
        run_dir: run folder.
        damaged: why a file, or some of its rows, cannot be used; it grows while files are read.
    """

    run_dir: Path
    damaged: dict[str, str] = field(default_factory=dict)

    @cached_property
    def status(self) -> Status:
        """Return the content of status.json."""
        return self._try(RunFolder(self.run_dir).load_status, Status())

    @cached_property
    def environment(self) -> Environment:
        """Return the content of environment.json, or defaults."""
        return self._json(self.run_dir / ENVIRONMENT, Environment) or Environment()

    @cached_property
    def dumps(self) -> dict[int, Dump]:
        """Return the flight recorders of the newest run: an older run may have had more ranks."""
        # Their names end with the rank. Other files of that kind in the folder are not ours.
        paths = [
            path
            for path in sorted(self.run_dir.glob("*/*.json"))
            if re.search(r"\d\.json$", path.name) and not path.name.startswith("launch-")
        ]
        # A few dumps keep all of their entries, thousands of dumps the newest 20 each.
        dumps, keep = [], max(_MAX_ENTRIES // max(len(paths), 1), 20)
        for path in paths:
            if dump := self._json(path, Dump, limit=_DUMP_BYTES):
                # Memory: 4,096 dumps of 2,000 entries would take gigabytes.
                del dump.entries[:-keep], dump.p2p[:-keep]
                dumps.append(dump)
        # Dumps of ranks that the newest run does not have are from an earlier, larger run.
        newest = max(dumps, key=lambda dump: dump.unix_s, default=None)
        return {d.rank: d for d in dumps if newest is not None and d.rank < newest.world_size}

    @property
    def without_dump(self) -> list[int]:
        """Return the ranks that wrote no dump, if others did."""
        world_size = max((dump.world_size for dump in self.dumps.values()), default=0)
        return [rank for rank in range(world_size) if rank not in self.dumps]

    @cached_property
    def exits(self) -> dict[int, int]:
        """Return the exit codes of ranks, as the launcher saw them; below 0: the signal."""
        return {
            # Keys are untrusted text: the pattern below keeps int() from surprises.
            int(rank): failure.exit_code
            for launch in self._launches
            for rank, failure in launch.ranks.items()
            # Whole seconds, as torchrun has them; older files are of an earlier run.
            if failure.unix_s >= int(self.environment.written_unix_s)
            and re.fullmatch(r"\d{1,6}", rank)
        }

    @cached_property
    def fatal(self) -> dict[int, signal.Signals]:
        """Return ranks with a fault in native code, by their exit or by the beginning of their stacks."""
        exits = {rank: -code for rank, code in self.exits.items()}
        fatal = {r: signal.Signals(n) for r, n in exits.items() if n in _FATAL.values()}
        for rank, path in self._of_ranks("stacks.txt"):
            with suppress(OSError):
                if path.stat().st_mtime < self.environment.written_unix_s:
                    continue
            # Such a process writes this line last. A live process writes stacks with a title.
            # Search from the end, so that the newest stack decides.
            for line in reversed(self._lines(path)):
                if _TITLE.match(line):
                    break
                if line == _ABORTED:
                    fatal.pop(rank, None)
                    break
                if line in _FATAL:
                    fatal[rank] = _FATAL[line]
        return fatal

    @property
    def num_oom_kills(self) -> int:
        """Return how many processes the kernel has killed in the cgroup of the run."""
        # The launcher outlives its ranks; without it, a surviving rank has counted.
        counts = [launch.oom_kills for launch in self._launches]
        return max([*counts, *(dump.oom_kills for dump in self.dumps.values())], default=0)

    @cached_property
    def metrics(self) -> list[LossRow]:
        """Return the newest rows of metrics.jsonl."""
        return self._rows(self.run_dir / METRICS, LossRow, 100)

    @cached_property
    def times(self) -> dict[int, list[Times]]:
        """Return the newest rows of each rank's own times."""
        # The clocks of machines differ by some seconds.
        since_s = self.environment.written_unix_s - 60
        return {
            rank: [row for row in self._rows(path, Times, 20) if row.unix_s >= since_s]
            for rank, path in self._of_ranks("times.jsonl")
        }

    @cached_property
    def holder(self) -> ProcessId | None:
        """Return the process that holds the run folder, if it lives."""
        path = self.run_dir / LOCK_FILE
        holder = self._json(path, ProcessId)
        if holder is None:
            return None
        # A process is visible on its own machine only. Elsewhere the age of its heartbeat decides.
        if holder.machine == ProcessId.this().machine != "":
            return holder if holder.is_running() else None
        with suppress(OSError):
            return holder if time.time() - path.stat().st_mtime < _FRESH_S else None
        return None

    @property
    def free_bytes(self) -> int:
        """Return the free bytes of the file system that holds the run folder."""
        return shutil.disk_usage(self.run_dir).free

    def stack(self, rank: int) -> str:
        """Return the place of a rank's main thread in its last stacks; an empty string if there are none."""
        threads: list[list[str]] = []
        for line in self._lines(stacks_file(self.run_dir, rank)):
            if line.startswith(("Thread 0x", "Current thread 0x")):
                threads.append([])
            elif threads and (frame := _FRAME.match(line)):
                threads[-1].append(f"{_short(frame[1])}:{frame[2]}, in {frame[3]}")
        frames = threads[-1] if threads else []  # the main thread is written last
        # The innermost line, and the innermost line of titan.
        ours = [frame for frame in frames if frame.startswith(("titan/", "models/"))]
        return " <- ".join(dict.fromkeys([*frames[:1], *ours[:1]]))

    # ---- reading -----------------------------------------------------------------------------------

    def _try(self, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except InputError as error:
            file, _, why = str(error).removeprefix(f"{self.run_dir}/").partition(": ")
            self.damaged.setdefault(file, f"{file}: {why}")
            return default

    def _json(self, path: Path, kind: type[T], *, limit: int = 2**20) -> T | None:
        """Read a JSON file; None if it is missing or damaged."""
        # A link that leads nowhere is damaged, not missing.
        if not is_there(path):
            return None
        return self._try(lambda: read_json(path, kind, limit=limit, within=path.parent), None)

    def _lines(self, path: Path) -> list[str]:
        if not is_there(path):
            return []
        return self._try(lambda: tail_lines(path, within=path.parent), [])

    def _rows(self, path: Path, kind: type[T], num: int) -> list[T]:
        """Return the newest whole rows. A kill may have torn the last line."""
        *lines, torn = self._lines(path) or [""]
        rows = [
            self._try(lambda x=x: parse_json(x, kind, name=path), None) for x in lines[-num:]
        ]
        if torn and any(rows):
            with suppress(InputError):
                rows.append(parse_json(torn, kind, name=path))
        elif torn:  # the only row
            rows.append(self._try(lambda: parse_json(torn, kind, name=path), None))
        return [row for row in rows if row is not None]

    @cached_property
    def _launches(self) -> list[LaunchRecord]:
        paths = sorted(self.run_dir.glob("logs/launch-*.json"))
        return [launch for path in paths if (launch := self._json(path, LaunchRecord))]

    def _of_ranks(self, ending: str) -> list[tuple[int, Path]]:
        """Return the ranks' files of a kind in logs/, by rank."""
        matches = [
            (re.fullmatch(rf"rank-(\d{{1,6}})\.{re.escape(ending)}", path.name), path)
            for path in self.run_dir.glob(f"logs/rank-*.{ending}")
        ]
        return sorted((int(match[1]), path) for match, path in matches if match)


def _short(file: str) -> str:
    match = _OURS.search(file)
    return match[1] if match and "site-packages" not in file else "/".join(file.split("/")[-2:])
