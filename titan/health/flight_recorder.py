"""What a rank's communication looked like when something went wrong: torch's flight recorder, in a file of our own.

torch remembers the newest collectives of each rank, with their sizes and the Python stack that called them (gloo and
NCCL, [comm] trace_buf_size). `dump` writes them into flight_recorder/rank-N.json, with what the main thread does, and the
stacks of all threads into logs/rank-N.stacks.txt. It is called on

    a failure       an unhandled exception, a collective's time limit, another rank that has failed (titan/health/monitor.py)
    std::terminate  gloo and NCCL end the process from a thread of their own, say where sizes differ; `catch_terminate`
    a hang          titan/health/watchdog.py; the end of the grace time after a signal
    SIGUSR2         somebody wants to know; training goes on

from threads that do not need the main one, which may wait in a collective for ever. `titan doctor` joins the files.

gloo's entries stay "scheduled" for good, so that a state says nothing there: ranks are compared by how many collectives each
has begun in a group. Nor does it record sends and receives (pipeline stages): `_record_p2p` counts these.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan.config.schema import CommSection
from titan.health.errors import Frame, frames_of, locate, oom_kills, recorded
from titan.health.stacks import Whereabouts, dump_stacks, main_thread, stacks_file
from titan.observe.runinfo import write_text_atomically

VERSION = 1
NEWEST = 2000  # entries of a dump: a step has tens to thousands, and what counts is at the end


@dataclass
class FlightRecorder:
    """One rank's; `step` says which step it is in (0: set-up)."""

    section: CommSection
    run_dir: Path
    rank: int
    world_size: int
    step: Callable[[], int]
    oom_kills: int = field(default_factory=oom_kills)  # before
    axes: dict[str, str] = field(default_factory=dict)  # of groups, by name
    p2p: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    p2p_counts: dict[tuple[int, bool], int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        name = f"{self.section.save_traces_file_prefix}{self.rank}.json"
        return self.run_dir / self.section.save_traces_folder / name


_recorder: FlightRecorder | None = None
_writing = threading.Lock()


def install(recorder: FlightRecorder) -> None:
    """Record from now on: before torch is imported, which reads the variables. What a user has set stays."""
    global _recorder
    _recorder = recorder
    recorder.path.unlink(missing_ok=True)  # of a run before
    if recorder.rank == 0:
        for path in recorder.run_dir.glob("logs/launch-*.json"):
            path.unlink(missing_ok=True)
    num = recorder.section.trace_buf_size
    # torch's own files of a NCCL time-out, for torchfrtrace; the rank is appended.
    own = str((recorder.path.parent / "nccl_trace_rank_").absolute())
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": str(num),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(num > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": own,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": own,
    }.items():
        os.environ.setdefault(name, value)
    if num > 0:
        recorder.path.parent.mkdir(parents=True, exist_ok=True)  # torch would not
    if recorder.world_size > 1:  # else the terminal is the place
        stacks = stacks_file(recorder.run_dir, recorder.rank)
        stacks.parent.mkdir(parents=True, exist_ok=True)
        stacks.unlink(missing_ok=True)
        faulthandler.enable(file=stacks.open("a"))


def close() -> None:
    """The rank has ended well: leave no empty file."""
    if _recorder is not None:
        stacks = stacks_file(_recorder.run_dir, _recorder.rank)
        if stacks.exists() and not stacks.stat().st_size:
            stacks.unlink()


def begin() -> None:
    """Once the process group is there."""
    if _recorder is not None and _recorder.section.trace_buf_size and _recorder.world_size > 1:
        _record_p2p(_recorder)


def name_axes(mesh: Any) -> None:
    """Which axis of the mesh a group is for: torch names the groups of a mesh, but not those that were there before."""
    if _recorder is not None:
        for axis in mesh.mesh_dim_names:
            _recorder.axes.setdefault(mesh.get_group(axis).group_name, axis)


def dump(reason: str, *, stacks: bool = True, at: Whereabouts | None = None) -> None:
    """Write this rank's dump and stacks, and never raise: the caller has worse to tell. at: where the main thread was, if it is not
    there any more."""
    if _recorder is None:
        return
    _writing.acquire(timeout=5)  # another may hang at a disk that is full or gone
    with suppress(Exception):
        if stacks:
            dump_stacks(stacks_file(_recorder.run_dir, _recorder.rank), reason)
    with suppress(Exception):
        if _recorder.section.trace_buf_size:
            text = json.dumps(
                _contents(_recorder, reason, at or main_thread()), separators=(",", ":")
            )
            write_text_atomically(_recorder.path, text + "\n", durable=False)
    with suppress(RuntimeError):
        _writing.release()


def catch_terminate(report: Callable[[str], None]) -> None:
    """Call `report` with a reason where C++ ends the process by std::terminate, before it does. It needs libstdc++; elsewhere
    the rank ends without last words."""
    try:
        set_handler = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def handle() -> None:
        with suppress(Exception):
            rank = _recorder.rank if _recorder else 0
            report(f"rank {rank} was ended by an error in C++, in {main_thread().text}")
        ctypes.CFUNCTYPE(None)(before)()  # prints the error, and aborts

    callback = ctypes.CFUNCTYPE(None)(handle)
    _kept.append(callback)
    before = set_handler(ctypes.cast(callback, ctypes.c_void_p))


_kept: list[Any] = []  # C++ holds only their addresses


# ---- what a dump says ------------------------------------------------------------------------------


def _contents(recorder: FlightRecorder, reason: str, at: Whereabouts) -> dict[str, Any]:
    groups = _groups(recorder.axes)
    entries = recorded(stacks=True)
    for entry in entries:
        group = groups.setdefault(entry["process_group"][0], {"axis": "", "ranks": []})
        begun = group.setdefault("begun", {})
        backend = _backend(entry)
        begun[backend] = max(begun.get(backend, 0), entry["collective_seq_id"])
    unfinished = [entry for entry in entries[:-NEWEST] if not entry["retired"]]
    kept = unfinished[-NEWEST:] + entries[-NEWEST:]
    return {
        "version": VERSION,
        "rank": recorder.rank,
        "world_size": recorder.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "reason": reason,
        "step": recorder.step(),
        "unix_s": round(time.time(), 3),
        "main_thread": asdict(at),
        "oom_kills": oom_kills() - recorder.oom_kills,
        "groups": groups,
        "entries": [_entry(entry) for entry in kept],
        "p2p": list(recorder.p2p),
    }


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    frames: list[Frame] = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    operation, place = locate(reversed(frames))
    return {
        "group": entry["process_group"][0],
        "backend": _backend(entry),
        "seq": entry["collective_seq_id"],
        "p2p_seq": entry["p2p_seq_id"] if entry["is_p2p"] else 0,
        "operation": entry["profiling_name"].rpartition(":")[2],
        "called": operation,
        "line": place.strip(" ()"),
        "input_sizes": entry["input_sizes"],
        "output_sizes": entry["output_sizes"],
        "input_dtypes": entry["input_dtypes"],
        "output_dtypes": entry["output_dtypes"],
        "state": entry["state"],
        "done": bool(entry["retired"]),
        "enqueued_unix_s": _seconds(entry["time_created_ns"]),
        "started_unix_s": _seconds(entry["time_discovered_started_ns"]),
        "ended_unix_s": _seconds(entry["time_discovered_completed_ns"]),
        "timeout_s": entry["timeout_ms"] / 1e3,
    }


def _backend(entry: dict[str, Any]) -> str:
    return entry["profiling_name"].rpartition(":")[0] or "gloo"


def _seconds(ns: int | None) -> float | None:
    return round(ns / 1e9, 6) if ns else None


def _axis(group: Any, axes: dict[str, str]) -> str:
    """`tp`, `all ranks`, `all ranks (dp_shard)`; empty for a group that nobody has named."""
    description = group.group_desc
    if description == "default_pg":
        axis = axes.get(group.group_name)
        return f"all ranks ({axis})" if axis else "all ranks"
    return "" if description == "undefined" else description.removeprefix("mesh_")


def _groups(axes: dict[str, str]) -> dict[str, Any]:
    """Name (the same on all its ranks) to axis and ranks. Private in torch, but the same in 2.11 to 2.15."""
    from torch.distributed.distributed_c10d import _world

    groups = {}
    with suppress(AttributeError):
        for group, name in _world.pg_names.items():
            ranks = sorted(_world.pg_group_ranks[group])
            groups[name] = {"axis": _axis(group, axes), "ranks": ranks}
    return groups


# ---- sends and receives ----------------------------------------------------------------------------


def _record_p2p(recorder: FlightRecorder) -> None:
    """Have gloo's sends and receives counted, by sender and receiver."""
    import torch.distributed as dist

    def recording(call: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def method(
            group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any, **kwargs: Any
        ) -> Any:
            work = call(group, tensors, peer, *args, **kwargs)
            with suppress(Exception):
                _note(group, tensors, peer)
            return work

        def _note(group: dist.ProcessGroup, tensors: Any, peer: int) -> None:
            ranks = dist.get_process_group_ranks(group)
            key = (ranks[peer], sends)
            recorder.p2p_counts[key] = seq = recorder.p2p_counts.get(key, 0) + 1
            _, place = locate(frames_of(sys._getframe(3)))
            recorder.p2p.append(
                {
                    "peer": key[0],
                    "sends": sends,
                    "seq": seq,
                    "axis": _axis(group, recorder.axes),
                    "size": list(tensors[0].shape),
                    "dtype": str(tensors[0].dtype).removeprefix("torch."),
                    "line": place.strip(" ()"),
                    "enqueued_unix_s": round(time.time(), 6),
                }
            )

        return method

    if dist.get_backend() != "gloo":
        return  # NCCL records its own
    # isend, irecv and batches of them come here, in every torch from 2.11 to 2.15.
    dist.ProcessGroup.send = recording(dist.ProcessGroup.send, sends=True)
    dist.ProcessGroup.recv = recording(dist.ProcessGroup.recv, sends=False)
