"""Activity and stacks of a rank's threads (logs/rank-N.stacks.txt), and processes that the kernel killed.

Nothing in this module waits for another thread or imports anything: it runs in processes whose main thread may hang.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from titan.base.errors import COMMUNICATION, UNNAMED, frames_of, kind_of, last_begun, locate
from titan.base.run_writer import open_to_write, run_files


@dataclass(frozen=True)
class Activity:
    """Activity of a main thread.

    Attributes:
        text: operation and source line.
        waits: whether the thread waits for other ranks or for the device.
    """

    text: str
    waits: bool


def where_failed(error: Exception) -> Activity:
    """Return the main thread's activity when it failed."""
    operation, line = locate(frames_of(error.__traceback__))
    return Activity(
        f"{operation or 'the program'}{line}", waits=kind_of(error) in COMMUNICATION
    )


def main_thread() -> Activity:
    """Return the main thread's current activity."""
    # This is called from other threads, so look up the main thread's frames.
    stack = frames_of(sys._current_frames()[threading.main_thread().ident or 0])
    operation, line = locate(stack)
    if operation == UNNAMED:
        operation = last_begun() or UNNAMED
    if "titan/base/async_scalars.py" in line:
        # The host waits for the device when it reads a scalar, whatever the device waits for.
        operation = "the wait for the device"
    return Activity(f"{operation or stack[-1][2]}{line}", waits=bool(operation))


def stacks_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's file of stacks."""
    return run_dir / "logs" / f"rank-{rank}.stacks.txt"


def open_stacks(run_dir: Path, rank: int) -> IO[str] | None:
    """Open a rank's file of stacks to append; None after a warning if that fails."""
    opened: list[IO[str]] = []
    path = stacks_file(run_dir, rank)
    run_files(run_dir).attempt(f"logs/{path.name}", lambda: opened.append(_open(path)))
    return opened[0] if opened else None


def _open(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return os.fdopen(open_to_write(path, flags, within=path.parents[1]), "a")


def dump_stacks(path: Path, title: str) -> None:
    """Append the stacks of all threads to a file, and the error that the main thread handles, if any.

    The error comes last: its traceback reads source files, and a disk may hang.
    """
    with _open(path) as file:
        file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n")
        file.flush()  # faulthandler writes to the descriptor, past Python's buffer
        faulthandler.dump_traceback(file, all_threads=True)
        # The stack shows where the error was caught, and not where it was raised.
        error = sys._current_exceptions().get(threading.main_thread().ident or 0)
        if isinstance(error, tuple):  # Python 3.10 and 3.11: type, value and traceback
            error = error[1]
        if error is not None:
            file.writelines(
                ["\nThe main thread handles:\n", *traceback.format_exception(error)]
            )


def count_oom_kills() -> int:
    """Count the processes of this cgroup (v2 or v1) that the kernel killed for lack of memory.

    It returns 0 if the count is unknown.
    """
    files = []
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # In a container the path is the host's, and the root of the mount is that group.
            if not controllers:
                files += [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
            elif "memory" in controllers.split(","):
                root = "/sys/fs/cgroup/memory"
                files += [f"{root}{path}/memory.oom_control", f"{root}/memory.oom_control"]
        for file in filter(Path.is_file, map(Path, files)):
            if match := re.search(r"^oom_kill (\d+)", file.read_text(), re.M):
                return int(match[1])
    except OSError:
        pass
    return 0
