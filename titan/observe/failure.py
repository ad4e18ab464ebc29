"""In one line, what a rank was doing when communication failed.

The text of a backend's error names a socket or a time limit, not the collective, and the traceback is fifty lines of
torch. Here the two are brought together: the operation and the line of ours that it was called from. Where that
line only waits for a result, the flight recorder (switched on by `record_collectives`) knows what was begun last.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

# Errors of gloo and NCCL are RuntimeErrors; only their words tell them apart.
_COMMUNICATION = re.compile(r"gloo|nccl|pair closure|closed by peer|reset by peer|timed out", re.I)
UNNAMED = "a collective"
_POINT_TO_POINT = "a send or receive between pipeline stages"
_OPERATIONS = {"_wait_batch_p2p": _POINT_TO_POINT, "_batch_p2p": _POINT_TO_POINT}


def record_collectives(num_collectives: int) -> None:
    """Have torch remember the collectives it starts; before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(num_collectives))


def describe_failure(error: Exception, *, rank: int, step: int) -> str | None:
    """Rank, step, operation, line and the error; None for an error that is not one of communication."""
    if not _COMMUNICATION.search(str(error)):
        return None
    operation, place = locate(traceback.walk_tb(error.__traceback__))
    if operation in ("", UNNAMED):
        operation = last_begun() or UNNAMED
    reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(" This is typically")[0].rstrip(".")
    return (
        f"rank {rank} failed in step {step} in {operation}{place}: {reason}. Another rank has probably ended or "
        "hangs; what it says comes first"
    )


def locate(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """The operation of torch.distributed that a stack (outermost frame first) is in, and the last line of ours before it;
    empty where there is none. Imports nothing: torch may be in the middle of its own import."""
    packages = [sys.modules[name] for name in ("titan", "titan.models") if name in sys.modules]
    roots = [Path(str(package.__file__)).parent for package in packages]
    dist = sys.modules.get("torch.distributed", object())
    operation = place = ""
    for frame, line in frames:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        root = next((root for root in roots if root in file.parents), None)
        if root is not None:
            operation = ""  # unless torch's frames below this one say which
            place = f" ({file.relative_to(root.parent)}:{line}, in {name})"
        elif name in _OPERATIONS or hasattr(dist, name):
            operation = _OPERATIONS.get(name, name)
        elif not operation and "/torch/distributed/" in file.as_posix():
            operation = UNNAMED
    return operation, place


def last_begun() -> str | None:
    """The collective that was begun last, from the flight recorder; torch's names are "gloo:all_reduce"."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
    if dump is None:  # not in every build
        return None
    # A pickle, but torch's own, from this process. Without stacks, and what is done as well.
    entries = pickle.loads(dump(True, False, False)).get("entries")
    if not entries:
        return None
    sizes = " and ".join(str(tuple(size)) for size in entries[-1]["input_sizes"])
    return f"{entries[-1]['profiling_name'].rpartition(':')[2]} of {sizes}"
