"""A signal asks the run to stop: it finishes its step, saves, and leaves with exit code 75 (please requeue me).

SIGTERM and SIGUSR1 come from schedulers, SIGINT from a person, whose second Ctrl-C ends the program at once. The
handlers are installed before torch is imported, which takes seconds in which a signal would be deadly.
"""

from __future__ import annotations

import signal
from types import FrameType

EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 0, 1, 2, 75


class StopRequest:
    """Whether, and by which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.signal_name = ""

    def install(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._remember)
        return self

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
