"""Where the threads of this process are: into a file for people, and in a few words for status.json.

For a process that does not go on by itself: nothing here waits for another thread, or imports anything.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from titan.health.errors import UNNAMED, frames_of, is_communication, last_begun, locate


@dataclass(frozen=True)
class Whereabouts:
    """What the main thread does."""

    text: str
    waits: bool  # for other ranks, or for the device


def stacks_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.stacks.txt"


def dump_stacks(path: Path, title: str) -> None:
    """Add the stacks of all threads to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {title}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def where_failed(error: Exception) -> Whereabouts:
    """What the main thread did when communication failed."""
    operation, place = locate(frames_of(error.__traceback__))
    return Whereabouts(f"{operation or 'the program'}{place}", waits=is_communication(str(error)))


def main_thread() -> Whereabouts:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = frames_of(frame)
    operation, place = locate(stack)
    if operation == UNNAMED:
        operation = last_begun() or UNNAMED
    if "titan/readback.py" in place:
        operation = "the wait for the device"
    return Whereabouts(f"{operation or stack[-1][2]}{place}", waits=bool(operation))
