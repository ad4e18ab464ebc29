"""In one line, what a rank was doing when communication failed.

The text of a backend's error names a socket or a time limit, not the collective, and the traceback is fifty lines of
torch. Here the two are brought together: the operation and the line of ours that it was called from. Where that
line only waits for a result, the flight recorder (switched on by `record_collectives`) knows what was begun last.
"""

from __future__ import annotations

import os
import pickle
import re
import traceback
from pathlib import Path

# Errors of gloo and NCCL are RuntimeErrors; only their words tell them apart.
_COMMUNICATION = re.compile(r"gloo|nccl|pair closure|closed by peer|reset by peer|timed out", re.I)
_POINT_TO_POINT = "a send or receive between pipeline stages"
_OPERATIONS = {"_wait_batch_p2p": _POINT_TO_POINT, "_batch_p2p": _POINT_TO_POINT}


def record_collectives(num_collectives: int) -> None:
    """Have torch remember the collectives it starts; before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(num_collectives))


def describe_failure(error: Exception, *, rank: int, step: int) -> str | None:
    """Rank, step, operation, line and the error; None for an error that is not one of communication."""
    if not _COMMUNICATION.search(str(error)):
        return None
    import torch.distributed as dist

    import titan
    import titan.models

    roots = [Path(str(package.__file__)).parent for package in (titan, titan.models)]
    operation, place = "a collective", ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        root = next((root for root in roots if root in file.parents), None)
        if root is not None:
            operation = "a collective"  # unless torch's frames below this one say which
            place = f" ({file.relative_to(root.parent)}:{frame.lineno}, in {frame.name})"
        elif frame.name in _OPERATIONS or hasattr(dist, frame.name):
            operation = _OPERATIONS.get(frame.name, frame.name)
    if operation == "a collective":
        operation = _last_begun() or operation
    reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(" This is typically")[0].rstrip(".")
    return (
        f"rank {rank} failed in step {step} in {operation}{place}: {reason}. Another rank has probably ended or "
        "hangs; what it says comes first"
    )


def _last_begun() -> str | None:
    """The collective that was begun last, from the flight recorder; torch's names are "gloo:all_reduce"."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # not in every build
        return None
    # A pickle, but torch's own, from this process. Without stacks, and what is done as well.
    entries = pickle.loads(_dump_fr_trace(True, False, False)).get("entries")
    if not entries:
        return None
    sizes = " and ".join(str(tuple(size)) for size in entries[-1]["input_sizes"])
    return f"{entries[-1]['profiling_name'].rpartition(':')[2]} of {sizes}"
