"""`python -m titan.cluster.node TORCHRUN-OPTIONS -m titan.train JOB.toml`: torchrun on one node of a cluster, made safe to signal.

Schedulers signal every process of a job (Slurm) or only the first one (Kubernetes). torchrun dies of SIGUSR1, and after
SIGTERM gives its ranks 30 seconds. Here both are left to the ranks, which finish their step, save, and leave with 75
(titan/health/signals.py), and torchrun waits for that as long as it takes.

    exit code   of this process
    0, 2, 75    its ranks' own, where they agree; 75 too where SIGUSR1 came before there were any
    143         SIGTERM came before there were ranks
    1           anything else; also where the ranks have ended, and torchrun waits for a store whose host is gone: for a
                quarter of an hour, were it left to TCP
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from titan.health.launch import ranks_of, torchrun
from titan.health.signals import EXIT_FAILED, EXIT_STOPPED

LEFT_TO_RANKS = (signal.SIGTERM, signal.SIGUSR1)
LINGER_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job; returns the exit code."""
    for number in LEFT_TO_RANKS:
        signal.signal(number, _pass_on)
    # Which ones torchrun handles; it installs its handlers over ours when it starts the ranks.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if store := _store(arguments):
        threading.Thread(target=_end_with_store, args=store, name="store", daemon=True).start()
    # The first node has the store; torchrun would guess, by its addresses.
    if (number := os.environ.get("SLURM_NODEID")) is not None:
        is_first = int(number == "0")
        arguments.insert(0, f"--rdzv-conf=rank={number},is_host={is_first}")
    return torchrun(arguments)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """To the ranks, which may have it already: they count no signal twice. Without ranks there is nothing to save."""
    ranks = ranks_of(os.getpid())
    for rank in ranks:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(rank, number)
    if not ranks and not _seen_ranks.is_set():
        os._exit(EXIT_STOPPED if number == signal.SIGUSR1 else 128 + number)


_seen_ranks = threading.Event()


def _end_with_store(host: str, port: int) -> None:
    """Ends this process once its ranks have ended, and the store's host has not answered for LINGER_S since."""
    last_good_s = time.monotonic()
    while not _seen_ranks.is_set() or time.monotonic() - last_good_s < LINGER_S:
        if ranks_of(os.getpid()):
            _seen_ranks.set()
            last_good_s = time.monotonic()
        elif _seen_ranks.is_set():
            with suppress(OSError), socket.create_connection((host, port), timeout=5):
                last_good_s = time.monotonic()
        time.sleep(1)
    words = f"{socket.gethostname()}: all ranks of this node have ended, and {host} does not answer: given up"
    print(words, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _store(arguments: Sequence[str]) -> tuple[str, int] | None:
    """Where torchrun meets the other nodes, if it is told so in a way that this understands."""
    endpoint = os.environ.get("PET_RDZV_ENDPOINT", "")
    for word in arguments:
        if word.startswith("--rdzv-endpoint="):
            endpoint = word.partition("=")[2]
    if not endpoint and "PET_MASTER_ADDR" in os.environ:
        endpoint = "{PET_MASTER_ADDR}:{PET_MASTER_PORT}".format(**os.environ)
    host, _, port = endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An interpreter that is torn down has no handlers any more, and a signal would change the exit code.
    os._exit(code)
