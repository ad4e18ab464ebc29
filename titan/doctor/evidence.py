"""What a run folder holds about how its run went: read once, leniently, since a run that has failed leaves half-written files."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from titan.lease import NAME, Owner, started
from titan.observe.runinfo import read_status
from titan.observe.stacks import stacks_file

_ERROR = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (?:ERROR|CRITICAL) +[\w.]+: (.*)$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OURS = re.compile(r"(?:^|/)((?:titan|models)/[\w/]+\.py)$")
_FRESH_S = 60  # of a lease whose owner is on another machine


@dataclass(frozen=True)
class Dump:
    """One rank's flight recorder; titan/observe/flight_recorder.py says what is in it."""

    rank: int
    host: str
    reason: str
    step: int
    unix_s: float
    doing: str
    waits: bool  # the main thread: for others, or for the device
    world_size: int
    oom_kills: int
    groups: dict[str, dict[str, Any]] = field(repr=False)
    entries: list[dict[str, Any]] = field(repr=False)
    p2p: list[dict[str, Any]] = field(repr=False)

    @staticmethod
    def read(path: Path) -> Dump | None:
        content = _json(path)
        try:
            return Dump(
                rank=content["rank"],
                host=content["host"],
                reason=content["reason"],
                step=content["step"],
                unix_s=content["unix_s"],
                doing=content["main_thread"]["text"],
                waits=content["main_thread"]["waits"],
                world_size=content["world_size"],
                oom_kills=content["oom_kills"],
                groups=content["groups"],
                entries=content["entries"],
                p2p=content["p2p"],
            )
        except (KeyError, TypeError):  # of another version, or not one of ours
            return None

    @property
    def idle_s(self) -> float | None:
        """Since the last collective, send or receive was begun."""
        times = [row[-1]["enqueued_unix_s"] for row in (self.entries, self.p2p) if row]
        return self.unix_s - max(times) if times else None


@dataclass
class Evidence:
    """Everything that is known; ranks that said nothing are missing from the tables by rank."""

    run_dir: Path

    @cached_property
    def status(self) -> dict[str, Any]:
        return read_status(self.run_dir)

    @property
    def state(self) -> str:
        return str(self.status.get("state", ""))

    @property
    def reason(self) -> str:
        return str(self.status.get("reason", ""))

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _json(self.run_dir / "environment.json")

    @cached_property
    def began_unix_s(self) -> float:
        return float(self.environment.get("written_unix_s", 0))

    @cached_property
    def dumps(self) -> dict[int, Dump]:
        """Of the run that wrote last: an older one may have had more ranks."""
        found = [Dump.read(path) for path in sorted(self.run_dir.glob("*/*.json"))]
        dumps = [dump for dump in found if dump is not None]
        if not dumps:
            return {}
        newest = max(dumps, key=lambda dump: dump.unix_s)
        return {dump.rank: dump for dump in dumps if dump.rank < newest.world_size}

    @property
    def world_size(self) -> int:
        sizes = [dump.world_size for dump in self.dumps.values()]
        return max(sizes, default=int(self.environment.get("world_size", 1)))

    @cached_property
    def errors(self) -> dict[int, str]:
        """The last error in each rank's log, of this run."""
        found = {}
        for path in self.run_dir.glob("logs/rank-*.log"):
            for line in _lines(path):
                match = _ERROR.match(line)
                if match and _local_time(match[1]) >= self.began_unix_s - 1:
                    found[int(path.stem.removeprefix("rank-"))] = match[2]
        return dict(sorted(found.items()))

    @cached_property
    def exits(self) -> dict[int, int]:
        """Exit codes of ranks, as the launcher saw them; below 0: the signal."""
        return {
            int(rank): failure["exit_code"]
            for launch in self._launches
            for rank, failure in launch["ranks"].items()
            if failure["unix_s"] >= int(self.began_unix_s)
        }

    @property
    def num_oom_kills(self) -> int:
        """Processes that the kernel has killed in the cgroup of the run."""
        seen = [launch["oom_kills"] for launch in self._launches]
        return max([*seen, *(dump.oom_kills for dump in self.dumps.values())], default=0)

    @cached_property
    def _launches(self) -> list[dict[str, Any]]:
        return [_json(path) for path in sorted(self.run_dir.glob("logs/launch-*.json"))]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return _rows(self.run_dir / "metrics.jsonl")[-100:]

    @cached_property
    def times(self) -> dict[int, list[dict[str, Any]]]:
        """Newest rows of each rank's own times."""
        found = {}
        for path in self.run_dir.glob("logs/rank-*.times.jsonl"):
            rows = [row for row in _rows(path) if row["unix_s"] >= self.began_unix_s - 60]
            found[int(path.name.split(".")[0].removeprefix("rank-"))] = rows[-20:]
        return dict(sorted(found.items()))

    @cached_property
    def owner(self) -> Owner | None:
        """The process that holds the run folder, if it lives."""
        path = self.run_dir / NAME
        try:
            owner = Owner(**_json(path))
            if owner.machine == Owner.this_process().machine != "":
                return owner if started(str(owner.pid)) == owner.started else None
            return owner if time.time() - path.stat().st_mtime < _FRESH_S else None
        except (OSError, TypeError):
            return None

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.run_dir).free

    def stack(self, rank: int) -> str:
        """Where the main thread of a rank was, by its last stacks; empty where there are none."""
        threads: list[list[str]] = []
        for line in _lines(stacks_file(self.run_dir, rank)):
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


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in _lines(path):
        with suppress(ValueError):  # the last line of a run that was killed
            rows.append(json.loads(line))
    return rows


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _local_time(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))
