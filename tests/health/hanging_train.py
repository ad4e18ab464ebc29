"""titan.train whose rank 1 hangs in its third step, in the way that HANG says; for torchrun. Where it hangs in its data, rank
0 has its report ready later, as on a busy machine: rank 1 has ended by then, and rank 0 lost its connection to it."""

from __future__ import annotations

import ctypes
import os
import time

from titan.data.loader import Loader
from titan.data.packing import Batch
from titan.ops import monitor
from titan.run import train

calls = 0
next_step = Loader.next_step


def hang(self: Loader) -> list[Batch]:
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        if os.environ["HANG"] == "locked":
            ctypes.PyDLL(None).sleep(1000)  # PyDLL does not let go of the interpreter's lock
        time.sleep(1000)
    return next_step(self)


if __name__ == "__main__":
    if os.environ["HANG"] == "data" and os.environ["RANK"] == "0":
        report = monitor.Monitor.find_hanging_ranks
        monitor.Monitor.find_hanging_ranks = lambda self: (time.sleep(5), report(self))[1]
    Loader.next_step = hang
    os._exit(train.main())
