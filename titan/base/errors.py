"""Failures of a run: a record with a kind, and the operation and source line of a thread.

The text of a backend's error names a socket or a time limit, not the collective, and its traceback
has fifty lines of torch. `Failure.of` combines the operation with the line of titan that called it.
If that line only waits for a result, torch's flight recorder knows which operation began last.

`kind` is set here, from the type of the error and not from its words. All later readers
(status.json, the dumps of flight_recorder.py, `titan doctor`) decide by it. A RunFailure of
titan/base/failure.py carries its kind and its exit code.

Nothing in this module waits for another thread or imports anything: it runs in processes whose main
thread may hang.
"""

from __future__ import annotations

import errno
import pickle
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from titan.base.failure import RunFailure
from titan.base.run_folder import State
from titan.base.signals import EXIT_FAILED, EXIT_USER_ERROR

# gloo, NCCL and the store raise RuntimeErrors without a number: only torch's words tell them apart.
_COMMUNICATION = re.compile(
    r"gloo|nccl|pair closure|closed by peer|reset by peer|timed out|tcpstore", re.I
)
_TIMEOUT = re.compile(r"timed out|timeout", re.I)
LOST_CONNECTION, TIMED_OUT = "connection_lost", "collective_timeout"
COMMUNICATION = (LOST_CONNECTION, TIMED_OUT)
_DISK = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "disk_full")
_LOST = (errno.EROFS, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.EHOSTDOWN)
_DISK |= dict.fromkeys(_LOST, "disk_lost")

UNNAMED = "a collective"
_POINT_TO_POINT = "a send or receive between pipeline stages"
# Users' names of operations. torch 2.13 renames two, and calls the new name from the old.
_OPERATIONS = {
    "_wait_batch_p2p": _POINT_TO_POINT,
    "_batch_p2p": _POINT_TO_POINT,
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
Frame = tuple[str, int, str]
"""File, line and function."""


@dataclass(frozen=True)
class Failure:
    """Cause of a run's end. The ranks agree on one (titan/ops/monitor.py), and status.json holds it.

    Attributes:
        reason: one line for people.
        kind: key of the doctor's table (titan/ops/doctor/diagnosis.py).
        step: training step of the failure.
        exit_code: exit code of the run.
        rank: rank that noticed the failure.
        silent: ranks that do not answer.
    """

    reason: str
    kind: str = "error"
    step: int = 0
    exit_code: int = EXIT_FAILED
    rank: int = 0
    silent: tuple[int, ...] = ()

    @property
    def state(self) -> State:
        """Return the state of the run for status.json."""
        return "hung" if self.kind in ("hang", "rank_silent") else "failed"

    @staticmethod
    def of(error: Exception, *, rank: int, step: int) -> Failure:
        """Describe an error in one line.

        Args:
            error: exception that ends the run, with its traceback.
            rank: this rank.
            step: training step of the error.
        """
        exit_code = error.exit_code if isinstance(error, RunFailure) else EXIT_FAILED
        kind = kind_of(error, default="user_error" if exit_code == EXIT_USER_ERROR else "error")
        if kind == "disk_lost":  # no mistake of the user: the same command continues
            exit_code = EXIT_FAILED
        operation, line = locate(frames_of(error.__traceback__))
        if kind in COMMUNICATION:
            # torch's Python frames name the operation only where they call it; a wait for its
            # result does not.
            if operation in ("", UNNAMED):
                operation = last_begun() or UNNAMED
            # Remove the position in C++ at its beginning, and torch's guess at the cause.
            text = (
                re.sub(r"^\[[^]]*\] ", "", str(error))
                .split(" This is typically")[0]
                .rstrip(".")
            )
            reason = (
                f"rank {rank} failed in step {step} in {operation}{line}: {text}. Another rank has "
                "probably ended or hangs: look at its message first"
            )
        elif explains_itself(error):
            reason = str(error)
        else:
            text = " ".join(str(error).split())
            reason = f"rank {rank} failed in step {step}{line}: {type(error).__name__}: {text}"
        return Failure(reason, kind=kind, step=step, exit_code=exit_code, rank=rank)


def kind_of(error: BaseException, *, default: str = "error") -> str:
    """Return the kind of failure of an error, by its type, its number or its causes.

    Args:
        error: exception, with its chain of causes.
        default: kind of an error that no rule knows.
    """
    # First the kinds and numbers of the error and all its causes: words are the last resort.
    chain = [*_chain(error)]
    for cause in chain:
        if isinstance(cause, RunFailure) and cause.kind:
            return cause.kind
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return _DISK[cause.errno]
        if type(cause).__name__ == "OutOfMemoryError":  # torch's; torch may not be imported yet
            return "out_of_device_memory"
    for cause in chain:
        # The pipeline wraps a lost connection in an error of another type.
        if isinstance(cause, RuntimeError) and _COMMUNICATION.search(str(cause)):
            return TIMED_OUT if _TIMEOUT.search(str(cause)) else LOST_CONNECTION
    # Errors of the data source may be of any type: a connection that is refused, a file that is gone.
    if any("(titan/data/" in locate(frames_of(cause.__traceback__))[1] for cause in chain):
        return "data_source"
    return default


def explains_itself(error: Exception) -> bool:
    """Return whether an error's message suffices for the user, without a traceback."""
    is_of_disk = isinstance(error, OSError) and kind_of(error) in ("disk_full", "disk_lost")
    return is_of_disk or isinstance(error, RunFailure)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes in a traceback's order, with the ranks' own errors of a DCP error."""
    while error is not None:
        yield error
        for cause, _ in getattr(error, "failures", {}).values():
            yield from _chain(cause)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def frames_of(at: TracebackType | FrameType | None) -> list[Frame]:
    """Return the stack of a traceback or of a running frame, outermost frame first."""
    if isinstance(at, FrameType):
        walked = [*traceback.walk_stack(at)][::-1]
    else:
        walked = [*traceback.walk_tb(at)]
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]


def locate(frames: Iterable[Frame]) -> tuple[str, str]:
    """Return the torch.distributed operation of a stack, and the last line of titan before it.

    Args:
        frames: stack, outermost frame first.

    Returns:
        Operation and line, each empty if the stack has no such frame.
    """
    # Not an import: torch may be in the middle of its own.
    dist = sys.modules.get("torch.distributed", object())
    operation = line = ""
    # From the outermost frame inwards: the last line of titan, and torch's operation below it.
    for file, number, name in frames:
        if ours := _within_titan(file):
            operation = ""  # torch's frames below this one may name it
            line = f" ({ours}:{number}, in {name})"
        elif name in _OPERATIONS or hasattr(dist, name):
            operation = _OPERATIONS.get(name, name)
        elif not operation and "/torch/distributed/" in file:
            operation = UNNAMED
    return operation, line


@cache
def _within_titan(file: str) -> str:
    """Return "titan/run/trainer.py" for a file of titan, an empty string for any other file."""
    for name in ("titan", "titan.models"):
        if name in sys.modules:
            root = Path(str(sys.modules[name].__file__)).parent
            if root in Path(file).parents:
                return Path(file).relative_to(root.parent).as_posix()
    return ""


def recorded_collectives(*, stacks: bool) -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorders, oldest first.

    Args:
        stacks: whether entries have the Python stacks of their callers.

    Returns:
        Entries of gloo and, in builds with CUDA, of NCCL.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if dump := getattr(module, name, None):
            # A pickle, but torch's, from this process. Both names may give the same entries.
            for entry in pickle.loads(dump(True, stacks, False)).get("entries") or ():
                entries[entry["profiling_name"], entry["pg_id"], entry["record_id"]] = entry
    return sorted(entries.values(), key=lambda entry: entry["time_created_ns"])


def last_begun() -> str | None:
    """Return the name and sizes of the collective that began last. torch's names are "gloo:all_reduce"."""
    entries = recorded_collectives(stacks=False)
    if not entries:
        return None
    sizes = " and ".join(str(tuple(size)) for size in entries[-1]["input_sizes"])
    return f"{entries[-1]['profiling_name'].rpartition(':')[2]} of {sizes}"
