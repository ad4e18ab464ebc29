"""In one line, what a rank was doing when it failed, or when somebody asks.

The text of a backend's error names a socket or a time limit, not the collective, and the traceback is fifty lines of
torch. Here the two are brought together: the operation and the line of ours that it was called from. Where that
line only waits for a result, torch's flight recorder (titan/health/flight_recorder.py) knows what was begun last.
"""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# Errors of gloo, NCCL and the store are RuntimeErrors; only their words tell them apart.
_COMMUNICATION = re.compile(
    r"gloo|nccl|pair closure|closed by peer|reset by peer|timed out|tcpstore", re.I
)
UNNAMED = "a collective"
_POINT_TO_POINT = "a send or receive between pipeline stages"
_OPERATIONS = {"_wait_batch_p2p": _POINT_TO_POINT, "_batch_p2p": _POINT_TO_POINT}
# torch 2.13 renames two and calls the new name from the old; users know the old.
_RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
Frame = tuple[str, int, str]
"""File, line and function."""


def is_communication(text: str) -> bool:
    return bool(_COMMUNICATION.search(text))


def describe_failure(error: Exception, *, rank: int, step: int) -> str | None:
    """Rank, step, operation, line and the error; None for an error that is not one of communication."""
    if not is_communication(str(error)):
        return None
    operation, place = locate(frames_of(error.__traceback__))
    if operation in ("", UNNAMED):
        operation = last_begun() or UNNAMED
    reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(" This is typically")[0].rstrip(".")
    return (
        f"rank {rank} failed in step {step} in {operation}{place}: {reason}. Another rank has probably ended or "
        "hangs; what it says comes first"
    )


def describe_error(error: Exception, *, rank: int, step: int) -> str:
    """Any other error that nobody expected."""
    _, place = locate(frames_of(error.__traceback__))
    text = " ".join(str(error).split())
    return f"rank {rank} failed in step {step}{place}: {type(error).__name__}: {text}"


def frames_of(at: TracebackType | FrameType | None) -> list[Frame]:
    """The stack of a traceback or of a running frame, outermost frame first."""
    if isinstance(at, FrameType):
        walked = [*traceback.walk_stack(at)][::-1]
    else:
        walked = [*traceback.walk_tb(at)]
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


def locate(frames: Iterable[Frame]) -> tuple[str, str]:
    """The operation of torch.distributed that a stack (outermost frame first) is in, and the last line of ours before it;
    empty where there is none. Imports nothing: torch may be in the middle of its own import."""
    dist = sys.modules.get("torch.distributed", object())
    operation = place = ""
    for file, line, name in frames:
        ours = _within_titan(file)
        if ours:
            operation = ""  # unless torch's frames below this one say which
            place = f" ({ours}:{line}, in {name})"
        elif name in _OPERATIONS or hasattr(dist, name):
            operation = _OPERATIONS.get(name) or _RENAMED.get(name, name)
        elif not operation and "/torch/distributed/" in file:
            operation = UNNAMED
    return operation, place


@cache
def _within_titan(file: str) -> str:
    """`titan/trainer.py` for a file of ours, else nothing."""
    for name in ("titan", "titan.models"):
        if name in sys.modules:
            root = Path(str(sys.modules[name].__file__)).parent
            if root in Path(file).parents:
                return Path(file).relative_to(root.parent).as_posix()
    return ""


def recorded(*, stacks: bool) -> list[dict[str, Any]]:
    """What torch's flight recorders hold, oldest first: gloo's, and in builds with CUDA NCCL's. Nothing where there is none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(module, name, None)
        # A pickle, but torch's own, from this process.
        found = pickle.loads(dump(True, stacks, False)).get("entries") if dump else None
        for entry in found or ():
            key = (entry["profiling_name"], entry["pg_id"], entry["record_id"])
            entries[key] = entry
    return sorted(entries.values(), key=lambda entry: entry["time_created_ns"])


def oom_kills() -> int:
    """Processes of this process's cgroup (v2 or v1) that the kernel has killed for want of memory; 0 where it does not say."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    places = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places += [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            # In a container the path is the host's, and the mount is what it names.
            root = "/sys/fs/cgroup/memory"
            places += [f"{root}{path}/memory.oom_control", f"{root}/memory.oom_control"]
    for place in places:
        try:
            found = re.search(r"^oom_kill (\d+)", Path(place).read_text(), re.M)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def last_begun() -> str | None:
    """The collective that was begun last; torch's names are "gloo:all_reduce"."""
    entries = recorded(stacks=False)
    if not entries:
        return None
    sizes = " and ".join(str(tuple(size)) for size in entries[-1]["input_sizes"])
    return f"{entries[-1]['profiling_name'].rpartition(':')[2]} of {sizes}"
