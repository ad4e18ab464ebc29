"""Signals that stop a run: it finishes its step, saves, and leaves with exit code 75 (please requeue me).

SIGTERM and SIGUSR1 come from schedulers, SIGXCPU from a limit of processor time, SIGHUP from a
terminal that closes, SIGINT from a person, whose second Ctrl-C ends the process at once. The handlers are installed before torch is imported, which takes seconds in which a signal
would end the process.

A Python handler does not run while the main thread waits inside a collective, which may last
forever: another rank can be gone. But Python's C handler also writes the signal's number into a
pipe (signal.set_wakeup_fd). A thread reads the pipe, answers the person, and ends the process after
a second Ctrl-C, or when the grace time is over.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 0, 1, 2, 75
EXIT_INTERRUPTED = 130  # as shells say it: 128 + SIGINT
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
for _number in (signal.SIGHUP, signal.SIGXCPU):
    if (
        signal.getsignal(_number) is not signal.SIG_IGN
    ):  # otherwise as under nohup: the run goes on
        STOPPING = (*STOPPING, _number)
ASKING = signal.SIGUSR2  # "where are you?"; the run goes on
_REPORT_S = 5  # limit of a last report: the disk may hang
_PR_SET_PDEATHSIG = 1
LAUNCHER = "TITANLAUNCHER"  # process id of the process that started this one


class StopRequest:
    """Request to stop this process by a signal, and the end of the process when the grace time is over.

    Attributes:
        signal_name: name of the signal, set by the main thread's handler; empty without a
            signal.
        seen: name of the signal, set by the thread that reads the pipe.
        exit_code: exit code of a run that has ended well and only has to leave; None before.
        is_leaving: whether a second Ctrl-C is ending the process.
        on_ask: called in a separate thread for SIGUSR2.
        on_stop: called in a separate thread for the first signal that stops, with its name.
        on_leave: called in a separate thread after a second Ctrl-C, before the process ends.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        # Set apart, since the main thread may never run its handler.
        self.seen = ""
        self.exit_code: int | None = None
        self._grace_s = 0.0
        self._report: Callable[[], None] = lambda: None
        self.is_leaving = False
        self.on_ask: Callable[[], None] = lambda: None
        self.on_stop: Callable[[str], None] = lambda name: None
        self.on_leave: Callable[[], None] = lambda: None
        self._armed, self._disarmed = threading.Event(), threading.Event()

    def install(self) -> StopRequest:
        """Install the handlers, and start the thread that watches the time. Return this object."""
        # Python's C handler writes the number of each signal into the pipe, whatever the main
        # thread does.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # as set_wakeup_fd demands
        for number in STOPPING:
            signal.signal(number, self._remember)
        # Without a handler the signal would end the process. The thread answers it.
        signal.signal(ASKING, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._watch, args=(reader,), name="signals", daemon=True
        ).start()
        return self

    @property
    def requested(self) -> bool:
        """Return whether a signal has asked the main thread to stop."""
        return bool(self.signal_name)

    def allow(self, grace_s: float, *, report: Callable[[], None]) -> None:
        """Set the grace time. It counts from the first signal, even one that has come already.

        Args:
            grace_s: seconds from the first signal to the end of the process.
            report: called in another thread. It must neither wait for the main thread nor
                import anything.
        """
        self._grace_s, self._report = grace_s, report
        self._armed.set()

    def disarm(self) -> None:
        """Cancel the end of the process: it leaves by itself."""
        self._disarmed.set()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._disarmed.is_set():  # the run is over
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def _watch(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number == ASKING:
                _start(self.on_ask)
            elif number in STOPPING and not self.seen:
                # The grace time begins with the signal, not with the call of `allow`.
                self.seen = signal.Signals(number).name
                _start(partial(self._end_in_time, time.monotonic()))
                _start(lambda: self.on_stop(self.seen))
            # A person who presses Ctrl-C again does not want to wait for a save.
            elif number == signal.SIGINT and not self._disarmed.is_set():
                self.is_leaving = True
                leave(for_agent(EXIT_INTERRUPTED), self.on_leave)

    def _end_in_time(self, received_s: float) -> None:
        """End the process when the grace time since `received_s` is over, unless it is leaving by then."""
        # The grace time is known from `allow` on: it is in the config.
        self._armed.wait()
        left_s = received_s + self._grace_s - time.monotonic()
        # Disarmed: the run saved in time and leaves.
        if not self._disarmed.wait(max(0, left_s)):
            code = EXIT_FAILED if self.exit_code is None else self.exit_code
            leave(for_agent(code), self._report)


def _start(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def leave(code: int, report: Callable[[], None], *, within_s: float = _REPORT_S) -> None:
    """End the process after `report`, whatever its other threads do.

    Args:
        code: exit code.
        report: called in another thread.
        within_s: time limit of `report`, in seconds.
    """
    _start(report).join(within_s)
    os._exit(code)


@contextmanager
def handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Handle signals in another way within a block. Only the main thread may enter it.

    Args:
        numbers: the signals.
        handler: as for signal.signal.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def has_agent() -> bool:
    """Return whether torchrun, or `titan train --nproc`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def for_agent(code: int) -> int:
    """Return the exit code of a rank that was asked to stop.

    torchrun --max-restarts starts a rank again unless it ends with 0. status.json has the real
    code.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return EXIT_DONE if has_agent() and restarts else code


def child_environment() -> dict[str, str]:
    """Return the environment for a command of titan that ends with this process (`die_with_launcher`)."""
    return os.environ | {LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """Call `die_with_parent` if titan or torchrun has started this process."""
    if LAUNCHER in os.environ or has_agent():
        die_with_parent()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. Linux only.

    A rank that outlived its agent would train on, and save, while another run takes its place.
    """
    # Removed, since programs that this process starts have another parent.
    parent = int(os.environ.pop(LAUNCHER, os.getppid()))
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(EXIT_FAILED)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to another process's main thread.

    os.kill lets the kernel choose a thread. While that thread writes all stacks, the main thread
    may leave its current call.
    """
    # Missing before glibc 2.30.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, number):
        os.kill(pid, number)
