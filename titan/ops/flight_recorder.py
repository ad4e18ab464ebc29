"""Dump of a rank's communication when something goes wrong.

torch remembers the newest collectives of each rank, with their sizes and the Python stack of their
caller (gloo and NCCL, [comm] trace_buf_size). `dump` writes them into flight_recorder/rank-N.json,
with the main thread's activity, and the stacks of all threads into logs/rank-N.stacks.txt. These
events cause a dump:

    a failure       an unhandled exception, a collective's time limit, a step's, or another rank's (ops/monitor.py)
    std::terminate  gloo and NCCL end the process from a C++ thread, for example if sizes differ; `catch_terminate`
    a late stop     the grace time after a signal is over
    SIGUSR2         a request; training goes on

Threads that do not need the main thread write it, since the main thread may wait in a collective
forever. `titan doctor` joins the files.

Ranks are compared by how many collectives each has begun in a group, and not by the state of an
entry: gloo's entries stay "scheduled" (docs/architecture.md). torch does not record gloo's sends and
receives either; `_record_p2p` counts them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from titan.base.errors import Failure, frames_of, locate, recorded_collectives
from titan.base.run_writer import run_files, write_text_atomically

from .activity import (
    Activity,
    count_oom_kills,
    dump_stacks,
    main_thread,
    open_stacks,
    stacks_file,
)

# Version of the dump's format. `titan doctor` reads it.
VERSION = 2
NEWEST = 2000  # entries of a dump: a step has tens to thousands, and the last ones matter


@dataclass
class FlightRecorder:
    """Record of one rank's communication.

    Attributes:
        section: config section [comm].
        run_dir: run folder.
        rank: this rank.
        world_size: number of ranks.
        oom_kills: processes of this cgroup that the kernel had killed before this run.
        axes: mesh axis of each process group, by the group's name.
        p2p: newest sends and receives of gloo.
    """

    section: Any
    run_dir: Path
    rank: int
    world_size: int
    oom_kills: int = field(default_factory=count_oom_kills)
    axes: dict[str, str] = field(default_factory=dict)
    p2p: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NEWEST))

    @property
    def path(self) -> Path:
        """Return the path of the dump."""
        name = f"{self.section.save_traces_file_prefix}{self.rank}.json"
        return self.run_dir / self.section.save_traces_folder / name


# One per process, like torch's: C++ and signals call it without an object at hand.
installed: FlightRecorder | None = None
_writing = threading.Lock()
_kept: list[Any] = []  # callbacks: C++ holds only their addresses


def install(recorder: FlightRecorder) -> None:
    """Start recording with a recorder.

    Call it before torch is imported, since torch reads the environment variables then. Variables
    that the user has set stay.
    """
    global installed
    installed = recorder
    # A dump of an earlier run would pass for this run's.
    old = [recorder.path]
    if recorder.rank == 0:
        old += recorder.run_dir.glob("logs/launch-*.json")
    if recorder.world_size > 1:
        old.append(stacks_file(recorder.run_dir, recorder.rank))
    files = run_files(recorder.run_dir)
    for path in old:
        files.remove(os.path.relpath(path, recorder.run_dir))
    num = recorder.section.trace_buf_size
    # torch's own files after a NCCL time-out, for torchfrtrace; torch appends the rank.
    own = str((recorder.path.parent / "nccl_trace_rank_").absolute())
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": str(num),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(num > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": own,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": own,
    }.items():
        os.environ.setdefault(name, value)
    if num > 0:
        folder = recorder.path.parent
        # torch would not.
        files.attempt(folder.name, partial(folder.mkdir, parents=True, exist_ok=True))
    # A single rank's stacks go to the terminal.
    if recorder.world_size > 1 and (stacks := open_stacks(recorder.run_dir, recorder.rank)):
        faulthandler.enable(file=stacks)


def begin() -> None:
    """Count sends and receives from now on. Call it when the process group exists."""
    if installed is not None and installed.section.trace_buf_size and installed.world_size > 1:
        _record_p2p(installed)


def name_axes(mesh: Any) -> None:
    """Record the axis of each group of a device mesh.

    torch names the groups of a mesh, except groups that existed before it.
    """
    if installed is not None:
        installed.axes.clear()  # of the layout before
        for axis in mesh.mesh_dim_names:
            installed.axes.setdefault(mesh.get_group(axis).group_name, axis)


def dump(failure: Failure, *, stacks: bool = True, at: Activity | None = None) -> None:
    """Write this rank's dump and stacks. It never raises: the caller has a worse failure to report.

    Args:
        failure: reason for the dump.
        stacks: whether to write the stacks of all threads.
        at: last activity of a main thread that has left it already.
    """
    if installed is None:
        return
    _writing.acquire(timeout=5)  # another thread may hang at a disk that is full or gone
    with suppress(Exception):
        # Stacks first: they need nothing of torch.
        if stacks:
            dump_stacks(stacks_file(installed.run_dir, installed.rank), failure.reason)
    with suppress(Exception):
        if installed.section.trace_buf_size:
            content = _contents(installed, failure, at or main_thread())
            text = json.dumps(content, separators=(",", ":"))
            write_text_atomically(
                installed.path, text + "\n", durable=False, within=installed.run_dir
            )
    with suppress(
        RuntimeError
    ):  # the lock was not ours after 5 seconds, and the owner released it
        _writing.release()


def catch_terminate(report: Callable[[str], None]) -> None:
    """Call `report` with a reason before C++ ends the process by std::terminate.

    It needs libstdc++. Without that library the rank ends without a report.
    """
    try:
        # The mangled name of std::set_terminate(void (*)()).
        set_handler = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def handle() -> None:
        with suppress(Exception):
            rank = installed.rank if installed else 0
            report(f"rank {rank} was ended by an error in C++, in {main_thread().text}")
        ctypes.CFUNCTYPE(None)(before)()  # prints the error, and aborts

    callback = ctypes.CFUNCTYPE(None)(handle)
    _kept.append(callback)
    before = set_handler(ctypes.cast(callback, ctypes.c_void_p))


# ---- the content of a dump -------------------------------------------------------------------------


def _contents(recorder: FlightRecorder, failure: Failure, at: Activity) -> dict[str, Any]:
    groups = _groups(recorder.axes)
    entries = recorded_collectives(stacks=True)
    for entry in entries:
        # Number of the newest collective that this rank has begun, by group and backend.
        begun = groups.setdefault(entry["process_group"][0], {"axis": "", "ranks": []})
        begun = begun.setdefault("begun", {})
        backend = _backend(entry)
        begun[backend] = max(begun.get(backend, 0), entry["collective_seq_id"])
    # The newest entries, and older ones that have not ended: a rank may have waited for long.
    unfinished = [entry for entry in entries[:-NEWEST] if not entry["retired"]]
    return {
        "version": VERSION,
        "rank": recorder.rank,
        "world_size": recorder.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "failure": asdict(failure),
        "step": failure.step,
        "unix_s": round(time.time(), 3),
        "main_thread": asdict(at),
        "oom_kills": count_oom_kills() - recorder.oom_kills,
        "groups": groups,
        "entries": [
            readable_entry(entry, groups[entry["process_group"][0]]["ranks"])
            for entry in unfinished[-NEWEST:] + entries[-NEWEST:]
        ],
        "p2p": list(recorder.p2p),
    }


def readable_entry(entry: dict[str, Any], ranks: list[int]) -> dict[str, Any]:
    """Select the fields of a torch entry for the doctor and readers. `ranks`: global ranks of its group."""
    frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    operation, line = locate(reversed(frames))  # torch has the innermost first
    return {
        "group": entry["process_group"][0],
        "backend": _backend(entry),
        "seq": entry["collective_seq_id"],
        "p2p_seq": entry["p2p_seq_id"] if entry["is_p2p"] else 0,
        "operation": entry["profiling_name"].rpartition(":")[2],
        "called": operation,
        "line": line.strip(" ()"),
        "input_sizes": entry["input_sizes"],
        "input_dtypes": entry["input_dtypes"],
        "output_sizes": entry["output_sizes"],
        "output_dtypes": entry["output_dtypes"],
        "peers": _peers(entry, ranks),
        "state": entry["state"],
        "enqueued_unix_s": _unix_s(entry["time_created_ns"]),
        # torch asks NCCL's streams; for gloo it knows neither.
        "started_unix_s": _unix_s(entry["time_discovered_started_ns"]),
        "ended_unix_s": _unix_s(entry["time_discovered_completed_ns"]),
        "duration_ms": entry.get("duration_ms"),  # with TORCH_NCCL_ENABLE_TIMING=1
        "timeout_ms": entry["timeout_ms"],
    }


def _unix_s(time_ns: int | None) -> float | None:
    return round(time_ns / 1e9, 6) if time_ns else None


def _peers(entry: dict[str, Any], ranks: list[int]) -> list[int]:
    """Return the global ranks of a send or receive, or all ranks of the group for a collective.

    The name of a send or receive ends in "0->1" or "1<-0", with ranks of the group.
    """
    pair = re.search(r" (\d+)(?:->|<-)(\d+)$", entry["profiling_name"])
    return [ranks[int(n)] for n in pair.groups() if int(n) < len(ranks)] if pair else ranks


def _backend(entry: dict[str, Any]) -> str:
    return entry["profiling_name"].rpartition(":")[0] or "gloo"


def _axis(group: Any, axes: dict[str, str]) -> str:
    """Return "tp", "all ranks" or "all ranks (dp_shard)"; an empty string for a group without a name."""
    description = group.group_desc
    if description == "default_pg":
        axis = axes.get(group.group_name)
        return f"all ranks ({axis})" if axis else "all ranks"
    return "" if description == "undefined" else description.removeprefix("mesh_")


def _groups(axes: dict[str, str]) -> dict[str, Any]:
    """Return the axis and the ranks of each group, by its name, which is the same on all its ranks."""
    # Private in torch, but the same in 2.11 to 2.15.
    from torch.distributed.distributed_c10d import _world

    groups = {}
    with suppress(AttributeError):
        for group, name in _world.pg_names.items():
            ranks = sorted(_world.pg_group_ranks[group])
            groups[name] = {"axis": _axis(group, axes), "ranks": ranks}
    return groups


def _record_p2p(recorder: FlightRecorder) -> None:
    """Count gloo's sends and receives, by peer and direction."""
    import torch.distributed as dist

    counts = Counter[tuple[int, bool]]()

    def note(group: dist.ProcessGroup, tensors: Any, peer: int, *, sends: bool) -> None:
        key = (dist.get_process_group_ranks(group)[peer], sends)
        counts[key] += 1
        # The frame of the caller of send or recv: above `note` and `method`.
        _, line = locate(frames_of(sys._getframe(2)))
        recorder.p2p.append(
            {
                "peer": key[0],
                "sends": sends,
                "seq": counts[key],
                "axis": _axis(group, recorder.axes),
                "size": list(tensors[0].shape),
                "dtype": str(tensors[0].dtype).removeprefix("torch."),
                "line": line.strip(" ()"),
                "enqueued_unix_s": round(time.time(), 6),
            }
        )

    def recording(call: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def method(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            work = call(group, tensors, peer, *args, **kwargs)
            with suppress(Exception):  # never fail a step for the sake of its record
                note(group, tensors, peer, sends=sends)
            return work

        return method

    if dist.get_backend() != "gloo":
        return  # NCCL records its own
    # isend, irecv and batches of them come here, in every torch from 2.11 to 2.15.
    dist.ProcessGroup.send = recording(dist.ProcessGroup.send, sends=True)
    dist.ProcessGroup.recv = recording(dist.ProcessGroup.recv, sends=False)
