"""titan.train whose rank 1 hangs in its third step, in the way that HANG says, and whose rank 0 comes to that step late, as it
does on a busy machine: rank 1's time is up first. For torchrun."""

from __future__ import annotations

import ctypes
import os
import time

from titan import train
from titan.data.loader import Loader
from titan.data.packing import Batch
from titan.watchdog import Watchdog

calls = 0
next_step, begin = Loader.next_step, Watchdog.begin


def hang(self: Loader) -> list[Batch]:
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        if os.environ["HANG"] == "locked":
            ctypes.PyDLL(None).sleep(1000)  # PyDLL does not let go of the interpreter's lock
        time.sleep(1000)
    return next_step(self)


def late(self: Watchdog, step: int, *, extra_s: float = 0) -> None:
    if step == 3 and os.environ["RANK"] == "0":
        time.sleep(3)
    begin(self, step, extra_s=extra_s)


if __name__ == "__main__":
    Watchdog.begin = late
    Loader.next_step = hang
    os._exit(train.main())
